"""The keys of the learner's records: every key of a step and of an evaluation, and its meaning.

`docs/log.md` is made of this table (hack/generate.py); a test holds it against the records of a run. Source: semantics,
sections 13 and 14.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping

_PER_SAMPLE = ("valid_pred_objects", "gt_objects", "fp", "fn", "matched_for_supervision")
_LENGTHS = {
    "prompt": "prompts, image tokens included",
    "rollout": "answers as they were generated",
    "train": "`Y_train`: the prefix that was kept, and what was appended",
    "append": "what was appended",
    "encoded": "whole segments: prompt, `Y_train`, end of turn",
}
_TRUTH_LENGTHS = {name: _LENGTHS[name] for name in ("prompt", "encoded")} | {"train": "answers"}

LOSS = {
    "loss": "The loss: cross entropy and coordinates, as trained on.",
    "loss/ce": "Cross entropy of the appended text and the end of turn.",
    "loss/coord": "Loss of all coordinate tokens.",
    "loss/coord_prefix": "Its mean over coordinates of matched objects in the answer.",
    "loss/coord_tail": "Its mean over coordinates of appended objects.",
    "grad_norm": "Norm of the gradient before clipping.",
    "learning_rate": "Learning rate of the step.",
}
TIME = {
    "time/rollout_generate_s": "Seconds of waiting for rollouts. This and the next three: 0 where they are reused.",
    "time/rollout_parse_match_s": "Seconds of parsing and matching.",
    "time/rollout_teacher_encode_s": "Seconds of encoding prompts and teacher-forced segments.",
    "time/post_rollout_pack_s": "Seconds of choosing rows.",
    "time/mask_build_s": "Seconds of laying out rows and masks.",
    "time/forward_s": "Seconds of forward passes and losses.",
}
STEP_TIME = {
    "step/wall_s": "Seconds of the step, from the reading of its records to its last weight; the parts add up to it.",
    "step/cpu_s": "CPU seconds of the learner process, all threads: what it costs where others share the machine.",
    "step/generate_s": "Of the former: waiting for rollouts while a server had a request.",
    "step/wait_s": "Waiting for anything else: other processes, servers that come back.",
    "step/encode_s": "Encoding, where training waited for it; images too.",
    "step/match_s": "Parsing and matching, where training waited for it.",
    "step/pack_s": "Choosing rows and laying them out.",
    "step/forward_s": "Forward passes and losses.",
    "step/backward_s": "Backward passes.",
    "step/optimizer_s": "Clipping and the optimizer.",
    "step/sync_s": "Weight syncs.",
    "step/log_s": "Writing rollouts down.",
    "step/other_s": "The rest.",
    "step/learner_idle_share": "Share of the step without forward, backward or optimizer.",
    "step/server_busy_share": "Share of the step in which a server had a request of ours, mean over servers.",
    "step/server_in_flight": "Mean number of requests that a server had, mean over servers.",
    "servers": "The last two of each server: `server`, `busy_share`, `in_flight`.",
}
PACKING = {
    "packing/post_rollout_fill": "Share of a row's `global_max_length` that holds segments.",
    "packing/post_rollout_selected_total_len": "Tokens of a row.",
    "packing/post_rollout_segments": "Segments in a row.",
    "packing/post_rollout_buffer": "Segments that wait for a later row.",
    "packing/post_rollout_scope_window": (
        "1 where all rows of the accumulation window were planned at once, 0 on a last partial window. These four only "
        "with `post_rollout_pack_scope: window`."
    ),
    "packing/window_fill": "Share of the window's rows that holds segments.",
    "packing/window_total_len": "Tokens of the window.",
    "packing/window_segments": "Segments of the window.",
}
SYNC = {
    "sync/version": "Optimizer step whose weights made the rollouts.",
    "sync/seconds": "Seconds of the weight push of this step; 0 where none was needed.",
    "sync/bytes": "Bytes of the tensors that it sent to each server or engine.",
    "sync/wire_bytes": (
        "Bytes that the learner handed to the sockets of all workers of all servers, or to NCCL: the tensors, and on "
        "each new link the message that opens it. TLS's framing is not counted."
    ),
    "sync/gigabytes_per_second": "The last in 1e9, for each second of packing to loading.",
    "sync/transport": (
        "What carried the weights: `tcp`, or `nccl` with the ways that it chose between members where it says them, "
        "such as `nccl (NET/IB)`. This and the next two: empty where nothing was pushed, or there is nothing to say."
    ),
    "sync/merge": "Where adapters were merged: `server` or `learner`.",
    "sync/merge_reason": "Why there: what was found, or that the configuration says so.",
    "sync/connect_s": "Forming transfer groups.",
    "sync/begin_s": "Stopping generation, and opening the update.",
    "sync/pack_s": "Merging and packing.",
    "sync/send_s": "Waiting for bytes to go out.",
    "sync/load_s": "Waiting for servers to load what had been sent.",
    "sync/finish_s": "Closing the update.",
    "sync/prove_s": "Comparing log-probabilities.",
    "sync/rounding_kept": (
        "Share of the adapters' update, since the start of training, that survived the cast of merged weights to the "
        "servers' dtype; 1 where no weights were pushed. Where it stays low, servers answer with an older policy: see "
        "`vllm.sync.rounding`."
    ),
    "memory/peak_bytes": (
        "Most memory that any learner process has taken since its start: reserved on its GPU, or resident on a machine "
        "without one."
    ),
}
PARSE = {
    "rollout/parse_dropped_invalid": "Objects that were dropped because they break the format, half ones included.",
    "rollout/parse_dropped_ambiguous": "Objects that were dropped because they can be read in two ways.",
    "rollout/parse_truncated": "Answers that end within the JSON.",
    "rollout/parse_truncated_rate": "Share of such answers.",
    "rollout/parse_obj_total": "Objects of all answers, dropped ones included.",
    "rollout/objects_per_truth": "The same for each object of the ground truth; what `runaway` watches.",
    "rollout/parse_obj_valid_frac": "Share of them that is valid.",
    "rollout/parse_obj_drop_frac": "Share of them that was dropped.",
    "rollout/sample_valid_pred_rate": "Share of answers with at least one valid object.",
}
MATCH = {
    "rollout/valid_pred_objects": "Valid objects of all answers.",
    "rollout/gt_objects": "Objects of the ground truth.",
    "rollout/matched_for_supervision": "Pairs of both that are trained on.",
    "rollout/fp": "Valid objects without such a pair.",
    "rollout/fn": "Objects of the ground truth without such a pair.",
    **{f"rollout/{name}_per_sample": f"`rollout/{name}` a sample." for name in _PER_SAMPLE},
    "rollout/precision": "Pairs over valid objects.",
    "rollout/recall": "Pairs over objects of the ground truth.",
    "rollout/f1": "Harmonic mean of both.",
    "rollout/recall_iou50": "Recall where only pairs of a mask IoU of at least 0.5 count.",
    "rollout/f1_iou50": "F1 where only those count.",
    "rollout/match_rate": "Pairs that passed the gate over objects of the ground truth.",
    "rollout/sample_any_match_rate": "Share of samples with at least one pair.",
    "rollout/gating_rejections": "Candidate pairs below `maskiou_gate`.",
    "rollout/gating_rejection_rate": "The same over `candidate_top_k` times the valid objects.",
    "rollout/matched_maskiou_mean": "Mean mask IoU of the pairs that passed the gate.",
    "rollout/matched_maskiou_count": "Pairs that passed the gate.",
    "rollout/fn_appended": "Objects of the ground truth that were appended.",
    "rollout/excluded_from_supervision": "Pairs for which no targets could be made.",
    "rollout/excluded_rate": "The same over the pairs that passed the gate.",
    "rollout/prefix_coord_targets_total": "Coordinate tokens in answers that have a target.",
    "rollout/prefix_coord_targets_per_matched": "The same for each pair.",
    "rollout/tail_ignore_frac": (
        "Share of the tokens behind the prefix that is not trained on: descriptions, unless `missed_desc_weight` says "
        "otherwise, and the answer's own objects where `missed_place` puts missed ones before them."
    ),
    "rollout/duplicates_removed": "Objects that repeat an earlier one and were taken out (`duplicate_iou`).",
    "rollout/unmatched_dropped": "Objects that match nothing and were taken out (`unmatched_objects: dropped`).",
    "rollout/unmatched_penalised": "Those that stayed and are taught against (`unmatched_objects: penalised`).",
    "rollout/misses_recovered": "Missed objects that a further answer found, and that weigh more (`recovery`).",
}
LENGTH = {
    **{f"rollout/{name}_len_mean": f"Mean tokens of {what}." for name, what in _LENGTHS.items()},
    **{f"rollout/{name}_len_p90": "Their 90th percentile." for name in _LENGTHS},
    "rollout/prefix_len_mean": "Mean tokens of answers that were kept.",
    "rollout/overlong_cut": "Answers too long for a packed row that were cut (`post_rollout_overlong`).",
    "rollout/overlong_skipped": "Answers too long for a packed row whose samples were not trained on.",
}
BAD = {
    "bad_samples": "Samples of the step that were set aside: they count in nothing else.",
    "bad_samples_total": "Samples of the run so far that were, each counted once: at most `training.max_bad_samples`.",
}
GENERATION = {
    "rollout/gen_new_tokens_total": "Tokens generated.",
    "rollout/gen_new_tokens_mean": "The same for each answer.",
    "rollout/gen_new_tokens_p90": "90th percentile over answers.",
    "rollout/gen_new_tokens_p99": "99th percentile over answers.",
    "rollout/gen_further_tokens_total": "Tokens of further answers, which nothing is trained on (`recovery`).",
    "rollout/gen_tokens_per_s": "Tokens generated, these included, per second of waiting.",
    "rollout/staleness": "Optimizer steps between the weights that made an answer and the training on it, mean.",
    "rollout/decode_greedy": "Answers decoded greedily, or sampled (`temperature` above 0).",
    "rollout/decode_beam": "Answers that are the best of several beams.",
    "rollout/ended_by_repetition": "Answers that repeated themselves and were ended for it (`repeat_terminate`).",
    "rollout/ended_by_length": "Answers that were cut at `max_new_tokens`.",
}
BUFFER = {
    "rollout/buffer_reuse": "1 where the step trains on rollouts of an earlier one, else 0.",
    "rollout/buffer_window_step0": "Optimizer step that made the rollouts.",
    "rollout/buffer_completed_steps": "Steps that had trained on them before this one.",
}
SUPERVISED = {
    "supervised/objects": "Objects of the ground truth that were trained on.",
    "supervised/objects_per_sample": "The same a sample.",
    **{f"supervised/{name}_len_mean": f"Mean tokens of {what}." for name, what in _TRUTH_LENGTHS.items()},
    **{f"supervised/{name}_len_p90": "Their 90th percentile." for name in _TRUTH_LENGTHS},
    "supervised/overlong_skipped": "Samples too long for a packed row, which were not trained on.",
}
SUPERVISED_STEPS = {"supervised/steps_total": "Optimizer steps of the run so far that trained on the ground truth."}
DESCRIPTIONS = {
    "desc/pairs": "Matched objects whose descriptions were compared, at most `max_pairs`.",
    "desc/exact": "Share of them whose description is the true one. This and the next with `mode: exact` or `both`.",
    "desc/normalised": "The same without case, spaces and punctuation.",
    "desc/semantic": "Share of them at least `semantic_threshold` alike. This and the next unless `mode: exact`.",
    "desc/semantic_mean": "Mean cosine similarity of the embeddings of both descriptions.",
}
EVALUATION = {
    "eval_runtime": "Seconds; of several processes the slowest.",
    "eval_samples_per_second": "Held-out samples per second.",
    "eval_steps_per_second": "Batches of them per second.",
    "eval_bad_samples": "Held-out samples that were set aside: they count in nothing else.",
    "eval_rollout_pred_objects": "Valid objects of all answers.",
    "eval_rollout_gt_objects": "Objects of the ground truth.",
    "eval_rollout_matched": "Pairs of both.",
    "eval_rollout_fp": "Valid objects without a pair.",
    "eval_rollout_fn": "Objects of the ground truth without a pair.",
    "eval_rollout_precision": "Pairs over valid objects.",
    "eval_rollout_recall": "Pairs over objects of the ground truth.",
    "eval_rollout_f1": "Harmonic mean of both.",
    "eval_rollout_recall_iou50": "Recall where only pairs of a mask IoU of at least 0.5 count.",
    "eval_rollout_f1_iou50": "F1 where only those count.",
    "eval_rollout_ap": "COCO's average precision, as `stage2 evaluate` has it; all objects rank alike.",
    "eval_rollout_ap50": "The same at IoU 0.5.",
    "eval_rollout_ap75": "The same at IoU 0.75.",
    "eval_rollout_ar": "COCO's average recall.",
    "eval_rollout_f1_class_iou50": (
        "F1 of one-to-one matches at IoU 0.5 with the true description; the checkpoint that is best at it is kept,"
        " unless `metric_for_best_model` names another figure."
    ),
    "eval_rollout_precision_class_iou50": "Precision of those matches.",
    "eval_rollout_recall_class_iou50": "Recall of those matches.",
    "eval_rollout_desc_exact": "Of the objects matched at IoU 0.5 without their class, the share named truly.",
    "eval_rollout_duplicates": "Objects that repeat an earlier one of the answer: its description, and its place.",
    "eval_rollout_objects_per_truth": "Valid objects for each object of the ground truth.",
    "eval_rollout_counting_error": "Mean over samples of how far these two numbers are apart.",
    "eval_rollout_parse_rate": "Share of answers that are whole, with nothing before, after or dropped.",
    "eval_rollout_loop_rate": "Share of answers that repeat themselves.",
    "eval_rollout_gating_rejections": "Candidate pairs below `maskiou_gate`.",
    "eval_rollout_parse_dropped_invalid": "Objects that were dropped because they break the format.",
    "eval_rollout_parse_dropped_ambiguous": "Objects that were dropped because they can be read in two ways.",
    "eval_rollout_parse_truncated_rate": "Share of answers that end within the JSON.",
    "eval_rollout_sample_valid_pred_rate": "Share of answers with at least one valid object.",
    "eval_rollout_sample_any_match_rate": "Share of samples with at least one pair.",
    "eval_rollout_matched_maskiou_mean": "Mean mask IoU of the pairs.",
    "eval_rollout_ended_by_repetition": "Answers that repeated themselves and were ended for it.",
    "eval_rollout_ended_by_length": "Answers that were cut at `max_new_tokens`.",
}

STEP = {**LOSS, **STEP_TIME, **TIME, **PACKING, **SYNC, **PARSE, **MATCH, **LENGTH, **GENERATION, **BAD, **BUFFER}
"""Every key of a step's record beside `event` and `step`."""

_INTRODUCTION = """\
<!-- Generated by hack/generate.py from stage2_trainer.telemetry.log_keys. Do not edit. -->
# The run's log

A run writes into `training.output_dir`:

| file | what it has |
| --- | --- |
| `stage2_log.jsonl` | One JSON object a line, each with its `event`: `reproducibility` (what a run is made of), \
`start` (training begins: the `step` that it goes on from, `max_steps`), `step`, `evaluation`, `evaluation_sample` \
(rollouts of a few held-out samples), `bad_sample` (one that was set aside: `part`, `step`, `sample_id`, `image`, \
`reason`), `best_checkpoint` (an evaluation that is better than all before it, whose checkpoint is saved: `step`, \
`metric`, `score`), `warning` (`level`, `logger`, `message`), `end` (`step`; `outcome`: `done`, `stopped` by SIGTERM, \
or `failed`; why, as `message`; a process that is killed writes none). A run that is started again goes on in the same \
file. Standard output has the same lines but for warnings, which standard error has. |
| `rollouts.jsonl` | One line a fresh rollout, of training and of evaluations, with all that `stage2 replay` needs. |
| `rank-1-rollouts.jsonl`, … | The same of each other learner process, where there are several. |
| `monitor_dumps` | With `monitor_dump.enabled`: samples of some steps, for people to read: `step_000001.json` and \
`.md`. |
| `trace.json`, `rank-1-trace.json`, … | With `training.trace`: what each thread did and which requests each server \
had, and when, for https://ui.perfetto.dev. |
| `checkpoint-N` | Checkpoints of transformers, with packing the samples that waited for a row (`waiting-*.pt`), \
the samples that were set aside (`bad_samples.json`), and a list of all files. Whole by its name: it is written in \
`.unfinished` and renamed. |

Keys of a `step` are below. Losses and `packing/*` are means over the step's micro-steps and processes; with
`post_rollout_pack_scope: step` losses are means over all its tokens, and `packing/*` over its rows. Counts are sums
over all its samples, `time/*` are sums over micro-steps of the slowest process (of several threads, which may
overlap), `step/*` are means over processes. On a step that reuses rollouts, counts are
those of the step that made them. A GRPO run has `step/*` and keys of its own: [grpo.md](grpo.md).
"""


def log_markdown() -> str:
    """Return docs/log.md."""
    sections = {
        "Loss": LOSS,
        "Where the step's wall time went": STEP_TIME,
        "Time of work": TIME,
        "Packing, with `training.packing: true`": PACKING,
        "Weights and memory": SYNC,
        "Parsing": PARSE,
        "Matching": MATCH,
        "Lengths": LENGTH,
        "Generation": GENERATION,
        "Bad samples": BAD,
        "Reuse, with `rollout_buffer.enabled: true` and `m_steps` above 1": BUFFER,
        "Stage 1 (`custom.trainer_variant: sft`), in the place of the last eight": SUPERVISED,
        "Of every step, with `supervised_share` above 0; one on the ground truth has the last nine": SUPERVISED_STEPS,
        "Descriptions, with `desc_monitor.enabled: true`": DESCRIPTIONS,
        "Keys of an `evaluation`": EVALUATION,
    }
    return "\n".join([_INTRODUCTION, *(line for title, keys in sections.items() for line in _section(title, keys))])


def _section(title: str, keys: Mapping[str, str]) -> Iterator[str]:
    yield f"## {title}\n"
    yield "| key | meaning |\n| --- | --- |"
    yield from (f"| `{key}` | {meaning} |" for key, meaning in keys.items())
    yield ""
