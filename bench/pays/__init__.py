"""Does stage 2 pay? From one stage-1 checkpoint: stage 1 continued, stage 2, and stage 2 with a recipe, side by side.

    python -m bench.pays run out/pays       data, stage 1, and all arms; what is there already is not done again
    python -m bench.pays table out/pays     the table of what has run, and bench/results/pays.json

Every arm starts from the same folder, takes the same number of optimizer steps of as many images, with the same rate,
and is evaluated on the same held-out images with the same greedy decoding. Rollouts are the learner's own (`hf`), so
there is no server.
"""
