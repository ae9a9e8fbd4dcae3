"""`stage2 learn CONFIG`: from a configuration to a trained model and to an exit code.

Mistakes of a person are found before torch is imported, which takes half a minute on a busy machine.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Iterator, Mapping
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from pathlib import Path
from typing import Any, Protocol

from stage2_api import log_lines
from stage2_api.course import to_train_on
from stage2_api.errors import EXIT_CONFIG, EXIT_FAILURE, EXIT_RETRYABLE, ConfigError, refused
from stage2_api.pod.layout import PROGRESS_PORT_VARIABLE, RESTARTS_VARIABLE, TERMINATION_LOG_VARIABLE
from stage2_api.runconfig import RunConfig
from stage2_trainer.checks.preflight import checked_records
from stage2_trainer.checks.supported import check_supported
from stage2_trainer.data.files import FOR_GOOD, FULL_DISK, check_place
from stage2_trainer.data.model_files import with_local_model
from stage2_trainer.data.run_records import RunRecords
from stage2_trainer.grpo.loaded_rewards import RewardError
from stage2_trainer.model.checkpoints import (
    CheckpointError,
    NonFiniteError,
    check_course,
    ends_training,
    flaw_of,
    newest_whole,
    proved_step_of,
    run_course,
    trained_step_of,
)
from stage2_trainer.model.deepspeed_state import check_deepspeed_state
from stage2_trainer.model.tensor_files import refuse_code, tensors_alone
from stage2_trainer.packing import PackingError
from stage2_trainer.process.activity import ACTIVITY, LIBRARIES, Report
from stage2_trainer.process.interrupt import Interrupt, Interrupted
from stage2_trainer.process.uncollected import uncollected
from stage2_trainer.rollouts.errors import BadStepError, RunawayError, TooManyBadSamples, VersionError
from stage2_trainer.sync.fleet.report import DigestError, ProofError
from stage2_trainer.sync.transports import nccl_choice
from stage2_trainer.telemetry.progress import ProgressServer, Reporter
from stage2_trainer.telemetry.prometheus import metered
from stage2_trainer.telemetry.run_context import Listed, RunContext
from stage2_trainer.telemetry.run_log import STEP_LOG, logged_end, open_logs, remove_run
from stage2_trainer.telemetry.timeline import TIMELINE, open_trace
from stage2_trainer.wire import credentials
from stage2_trainer.wire.credentials import host_and_port, is_loopback, read_token
from stage2_trainer.wire.errors import ServerError

logger = logging.getLogger(__name__)

# Errors that all learner processes meet.
MET_BY_ALL = (
    DigestError, ServerError, Interrupted, PackingError, BadStepError, TooManyBadSamples, RunawayError, RewardError,
)  # fmt: skip
MAKE_ROOM = "Saved checkpoints are whole, and the next start resumes from the newest. Make room"
POD_VARIABLE = "KUBERNETES_SERVICE_HOST"  # set in every pod


class Run(Protocol):
    """A run that trains: a `Learner`, or a trainer of GRPO."""

    def train(self, checkpoint: Path | None, /) -> object:
        """Train to the end, from the beginning or from a checkpoint."""
        ...

    def save_progress(self) -> None:
        """Save the last whole step of this start, unless it is on disk."""
        ...

    def set_unproved_aside(self) -> None:
        """Rename the checkpoints since the last proof."""
        ...


def learn(config: RunConfig, *, overwrite: bool = False, servers: Listed | None = None) -> int:
    """Train as the configuration says.

    overwrite: remove the earlier run in the output folder, once configuration and records are known to be good.
    servers: see `RunContext`.

    Returns 0 when training has ended; EXIT_CONFIG when a person must change something; EXIT_RETRYABLE when servers were
    lost, a number was not finite or the process was asked to stop: the next start resumes from the last checkpoint; 1
    for anything else, such as servers that answer with other weights than the pushed ones.
    """
    _log_to_stderr()
    reporter = Reporter(restarts=int(os.environ.get(RESTARTS_VARIABLE, "0")))
    try:
        with ExitStack() as stack:
            stack.enter_context(ACTIVITY.reported(_to_log_and_report(reporter)))
            _learn(config, reporter, stack, overwrite=overwrite, servers=servers)
        reporter.update(phase="done", message="")
        return os.EX_OK
    except (ConfigError, PackingError) as error:
        return _failed(reporter, str(error), EXIT_CONFIG)
    except (ServerError, Interrupted, CheckpointError, NonFiniteError, BadStepError) as error:
        return _failed(reporter, str(error), EXIT_RETRYABLE)
    except ProofError as error:
        return _failed(reporter, str(error), EXIT_FAILURE)
    except Exception as error:
        logger.exception("training failed")
        return _failed(reporter, *_message_and_code(config, error))
    finally:
        _write_termination_log(reporter, os.environ)


def _message_and_code(config: RunConfig, error: Exception) -> tuple[str, int]:
    """Return the message and the exit code of an error that is neither a person's nor a server's."""
    if isinstance(error, OSError) and error.errno in FULL_DISK:
        return f"training.output_dir {config.training.output_dir}: {error}. {MAKE_ROOM}", EXIT_RETRYABLE
    return f"{type(error).__name__}: {error}", EXIT_FAILURE


def check(config: RunConfig, *, world_size: int, overwrite: bool = False) -> int:
    """Check configuration and records for so many processes, before any of them starts.

    overwrite: see `learn`. Returns 0, or the exit code of the error, reported as `learn` would.
    """
    try:
        check_supported(config, world_size=world_size)
        _check_output(config)
        checked_records(config, world_size=world_size)
        with_local_model(config)
        if overwrite:
            _remove_earlier_run(config)
    except (ConfigError, OSError) as error:
        _log_to_stderr()
        reporter = Reporter()
        failure = (str(error), EXIT_CONFIG) if isinstance(error, ConfigError) else _message_and_code(config, error)
        code = _failed(reporter, *failure)
        _write_termination_log(reporter, os.environ)
        return code
    return os.EX_OK


def _learn(config: RunConfig, reporter: Reporter, stack: ExitStack, *, overwrite: bool, servers: Listed | None) -> None:
    world_size = int(os.environ.get("WORLD_SIZE", "1"))
    check_supported(config, world_size=world_size)
    _check_output(config)
    token = _token(config, os.environ)
    host = _host(config, os.environ)
    stack.enter_context(_progress_server(reporter, host, token, os.environ))
    interrupt = Interrupt(world_size)
    interrupt.listen()
    stack.enter_context(nccl_choice.logged_into_a_file(os.environ))
    with interrupt.stoppable(nothing_to_save=True):
        records = checked_records(config, world_size=world_size)
    if overwrite:
        _remove_earlier_run(config)
    with interrupt.stoppable(nothing_to_save=True), ACTIVITY.doing(f"looking for the model {config.model.model}"):
        config = with_local_model(config)
    course = run_course(config, records.fingerprint, world_size=world_size)
    with interrupt.stoppable(nothing_to_save=True):
        checkpoint = _checkpoint(config, course)
    reporter.update(resumed_step=0 if checkpoint is None else trained_step_of(checkpoint))
    if checkpoint is not None and _has_ended(config, checkpoint, reporter):
        return
    log, rollout_log = open_logs(config, int(os.environ.get("RANK", "0")), stack)
    log = metered(log, reporter, os.environ, host=host, stack=stack)
    stack.enter_context(logged_end(log, reporter))
    TIMELINE.trace = open_trace(config, int(os.environ.get("RANK", "0")), stack)
    chosen = config.training.resume_from_checkpoint is not None  # a person who names a checkpoint vouches for it
    asks_proof = checkpoint is not None and not chosen and config.rollout_matching.vllm.sync.verify_every
    context = RunContext(
        token,
        reporter,
        interrupt,
        log,
        rollout_log,
        servers=servers,
        course=course,
        earlier_proof=proved_step_of(checkpoint) if checkpoint is not None and asks_proof else None,
    )
    with interrupt.stoppable(nothing_to_save=True):
        stack.enter_context(tensors_alone(deepspeed=config.uses_deepspeed))
        if checkpoint is not None:
            refuse_code(checkpoint, path=_key_of_checkpoint(config), deepspeed=config.uses_deepspeed)
        run = _make_run(config, records, context, stack)
    _train(run, checkpoint)


def _make_run(config: RunConfig, records: RunRecords, context: RunContext, stack: ExitStack) -> Run:
    if config.rlhf is None:
        with ACTIVITY.doing(LIBRARIES), uncollected():
            from stage2_trainer.learner.build import build_learner

        return build_learner(config, records, context, stack)
    with ACTIVITY.doing(LIBRARIES), uncollected():
        from stage2_trainer.grpo import build  # TRL takes seconds more, and no other run needs it

    return build.build_trainer(config, records, context, stack)


def _train(run: Run, checkpoint: Path | None) -> None:
    """Train from the beginning or from a checkpoint; save the last step when training ends early.

    Not where a number was not finite: the weights that led there are not worth keeping.
    """
    if checkpoint is not None:
        logger.info("resuming from %s", checkpoint)
    try:
        run.train(checkpoint)
    except (CheckpointError, NonFiniteError):
        raise
    except BaseException as error:
        with _logged_errors():
            _save_last_step(run, error)
        raise


def _save_last_step(run: Run, error: BaseException) -> None:
    """Save the last step, but not after a failed proof: its rollouts may have come from other weights.

    Checkpoints since the last proof are set aside then. Where digests or versions differ, nothing was trained on such
    rollouts, so the last step is saved.
    """
    if isinstance(error, ProofError) and not isinstance(error, (DigestError, VersionError)):
        run.set_unproved_aside()
    elif int(os.environ.get("WORLD_SIZE", "1")) == 1 or isinstance(error, MET_BY_ALL):
        # Any other error hits one process of several, which would wait for the others for ever.
        run.save_progress()


@contextmanager
def _logged_errors() -> Iterator[None]:
    """Log an error of the block instead of raising it: the original error says more."""
    try:
        yield
    except Exception:
        logger.exception("the last step could not be saved")


def _check_output(config: RunConfig) -> None:
    """Raise ConfigError where the output folder cannot be written to, and OSError where that may be temporary.

    A full disk and an unresponsive mount may be: a run of a week must outlive both.
    """
    try:
        check_place("training.output_dir", Path(config.training.output_dir) / STEP_LOG)
    except ConfigError as error:
        if isinstance(error.__cause__, OSError) and error.__cause__.errno not in FOR_GOOD:
            raise error.__cause__ from None
        raise


def _remove_earlier_run(config: RunConfig) -> None:
    for removed in remove_run(Path(config.training.output_dir)):
        logger.warning("--overwrite: removed %s", removed)


def _checkpoint(config: RunConfig, course: Mapping[str, Any]) -> Path | None:
    """Return the checkpoint to resume from: the configured one, else the newest whole one of the output folder.

    Raises ConfigError for one that is not whole, or of another run.
    """
    training = config.training
    if (named := training.resume_from_checkpoint) is None:
        checkpoint = newest_whole(Path(training.output_dir))
    elif flaw := flaw_of(checkpoint := Path(named)):
        rule, way_out = f"must be a whole checkpoint: {flaw}", "name an older one, or leave it out for the newest whole"
        raise refused("training.resume_from_checkpoint", named, rule, way_out)
    if checkpoint is not None:
        # First, because it also holds where changes are allowed, which is a way out of the other one.
        check_deepspeed_state(checkpoint, config, path=_key_of_checkpoint(config))
        check_course(checkpoint, course, allow_changes=training.resume == "allow-changes")
    return checkpoint


def _key_of_checkpoint(config: RunConfig) -> str:
    return f"training.{'resume_from_checkpoint' if config.training.resume_from_checkpoint else 'output_dir'}"


def _has_ended(config: RunConfig, checkpoint: Path, reporter: Reporter) -> bool:
    """Whether the run in the output folder has ended already; logs it."""
    training = config.training
    step = ends_training(checkpoint, max_steps=training.max_steps, epochs=training.num_train_epochs)
    if step is None:
        return False
    logger.info(
        "training.output_dir %s: this run ended at step %d, there is nothing left to train (%s). To train on, %s; to"
        " train anew, use --overwrite, or name another folder",
        training.output_dir,
        step,
        checkpoint,
        to_train_on(training),
    )
    reporter.update(step=step, max_steps=step)
    return True


def _log_to_stderr() -> None:
    log_lines.configure(logging.INFO)
    logging.getLogger("httpx").setLevel(logging.WARNING)  # huggingface_hub logs every request with it


def _progress_server(
    reporter: Reporter, host: str, token: str, environment: Mapping[str, str]
) -> AbstractContextManager[object]:
    """Serve the progress of the first process where a port is configured."""
    port = environment.get(PROGRESS_PORT_VARIABLE)
    if not port or environment.get("RANK", "0") != "0":
        return nullcontext()
    certificate = credentials.own_certificate(environment)
    context = certificate.context() if certificate else None
    return ProgressServer(reporter, host=host, port=int(port), token=token, tls=context)


def _host(config: RunConfig, environment: Mapping[str, str]) -> str:
    """Return the address of the learner's own routes.

    Loopback where all servers are on this machine, or where there are none and this is no pod; else all interfaces.
    """
    if not config.rollout_matching.uses_servers:
        local = POD_VARIABLE not in environment
    else:
        servers = config.rollout_matching.vllm.server.resolved_servers()
        local = all(is_loopback(host_and_port(server.base_url)[0]) for server in servers)
    return "127.0.0.1" if local else "0.0.0.0"


def _token(config: RunConfig, environment: Mapping[str, str]) -> str:
    """Return the bearer token; a run without servers and without a progress port needs none.

    Raises:
        ConfigError: the token, or a certificate for TLS, is missing or unreadable.
    """
    if not config.rollout_matching.uses_servers and not environment.get(PROGRESS_PORT_VARIABLE):
        return ""
    served = config.rollout_matching.vllm.server
    for server in served.resolved_servers():
        credentials.trust(server.base_url, environment)
        if served.protocol == "vllm":  # its workers check a certificate on the links of weight sync
            credentials.required_certificate(server.base_url, environment)
    return read_token(environment)


def _failed(reporter: Reporter, message: str, code: int) -> int:
    for line in message.splitlines():
        logger.error("%s", line)
    reporter.update(phase="failed", message=message)
    return code


def _to_log_and_report(reporter: Reporter) -> Report:
    """Return what logs and reports what the first process of a learner is doing."""

    def report(line: str) -> None:
        if line:
            logger.info("%s", line)
        reporter.update(message=line)

    return report if os.environ.get("RANK", "0") == "0" else lambda line: None


def _write_termination_log(reporter: Reporter, environment: Mapping[str, str]) -> None:
    path = environment.get(TERMINATION_LOG_VARIABLE)
    if path and environment.get("RANK", "0") == "0":
        reporter.write_termination_log(Path(path))
