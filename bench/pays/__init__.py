"""Does stage 2 pay? From one stage-1 checkpoint: stage 1 continued, stage 2, stage 2 with a recipe, and GRPO.

    python -m bench.pays run out/pays       data, stage 1, and all arms; what is there already is not done again
    python -m bench.pays table out/pays     the tables of what has run, and bench/results/pays.json

Every arm starts from the same folder and trains on as many images a step, with the same rate and schedule: once for
the same number of optimizer steps, and once for the CPU seconds that arm b took. The last weights of all of them answer
the same held-out images by the same greedy decoding. Rollouts are the learner's own (`hf`), so there is no server.
"""
