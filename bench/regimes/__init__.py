"""Few images and missing labels: whether stage 2 beats the tricks that cost nothing.

`python -m bench.regimes run FOLDER` trains what the file of figures lacks, and `table` says what came of it. Each run
appends a line to the file, so a study goes on where it was left, on another machine too: a start is made again from its
number. `bench.pays` compares the recipes where labels are complete and images many.
"""
