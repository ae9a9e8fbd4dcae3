"""Chaos: a learner and its servers are killed and stopped in each phase of a run, and nothing is lost for good.

Whatever happens, the run ends with 0, or with an exit code after which the next start ends with 0; and it ends with the
weights of a run that nothing happened to, bit for bit. `-s` prints the table of what was lost and how long it took.
"""

import collections
import contextlib
import itertools
import json
import os
import signal
import socket
import sys
import threading
import time
from dataclasses import replace
from datetime import UTC, datetime, timedelta

import pytest

from stage2_api.pod.layout import TLS_CA_FILE_VARIABLE, TLS_CERT_FILE_VARIABLE
from stage2_trainer.model.checkpoints import newest_whole
from stage2_trainer.sync.fleet.proof import FLOAT32_TOLERANCE
from stage2_trainer.sync.transports import link
from stage2_trainer.sync.transports.link import MAGIC, Member, new_group_name
from stage2_trainer.wire.client import ServerClient
from tests.integration import policies
from tests.integration.chaos import CLOCK, MOMENTS, PHASES
from tests.integration.conftest import (
    LONG_S,
    Served,
    launch,
    patience,
    run_config,
    stop,
    url_of,
    wait_until_healthy,
)
from tests.integration.runs import adapter, learning
from tests.integration.strikes import strike, wait_until_stopped
from tests.integration.test_fault_table import learner_config
from tests.support import certificates, forked
from tests.support.ports import free_port
from tests.support.recorder import recording

STEPS, CHATS = 4, 4
STANDSTILL_S, LONGEST_S = 4.0, 15.0  # for which one that stands still is waited for
WHO = ("learner", "server")
BLOWS = (signal.SIGKILL, signal.SIGSTOP)
DAY_S = 86_400
LONG_AGO = datetime.now(UTC) - timedelta(days=500)
REPLAY_S = 3.0  # for an answer to what is sent again


def cells():
    """Every cell; in turns, each day has another phase of each process and blow."""
    phases, blows = list(PHASES), [(who, blow) for who in WHO for blow in BLOWS]
    tried = [(*blow, phase) for turn, blow in enumerate(blows) for phase in phases[turn:] + phases[:turn]]
    return [pytest.param(who, blow, phase, id=f"{who} {blow.name} {phase}") for who, blow, phase in tried]


def standstill_s():
    return min(patience(STANDSTILL_S), LONGEST_S)


def configured(folder, servers, model_path, timeout_s=LONG_S, **training):
    """A configuration of the run, in a folder of its own."""
    folder.mkdir(parents=True, exist_ok=True)
    steps = {"max_steps": STEPS, "effective_batch_size": CHATS, "learning_rate": 1e-3}
    saves = {"save_strategy": "steps", "save_steps": 1}
    return learner_config(folder, servers, model_path, timeout_s=timeout_s, **steps, **saves, **training)


def chaotic(config, token_file, *blow, start=0, **environment):
    """Start the learner of `chaos`; its log is that of a start of this number."""
    command = [sys.executable, "-m", "tests.integration.chaos", *map(str, blow)]
    log = config.with_name(f"learner-{start}.log")
    return learning(config, log, command=command, STAGE2_TOKEN_FILE=token_file, **environment)


def logs(config):
    return "\n".join(file.read_text() for file in sorted(config.parent.glob("learner-*.log")))


def lines(path):
    return [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []


def done_again(output):
    """How many steps are on record, and how many answers, beyond those of a run that nothing happened to."""
    events = lines(output / "stage2_log.jsonl")
    assert not [one for one in events if one["event"] == "bad_sample"]
    steps = sum(one["event"] == "step" for one in events)
    return steps - STEPS, len(lines(output / "rollouts.jsonl")) - STEPS * CHATS


def seconds_to_next_step(config):
    """Seconds from the blow to the next step on record; to now where none came."""
    moments = lines(config.with_name(MOMENTS))
    (struck,) = (one["at"] for one in moments if one["what"] == "blow")
    return (
        min((one["at"] for one in moments if one["what"] == "step" and one["at"] > struck), default=time.monotonic())
        - struck
    )


def assert_same_run(output, undisturbed):
    found, expected = adapter(output, STEPS), adapter(undisturbed, STEPS)
    assert found.keys() == expected.keys()
    assert [name for name, tensor in found.items() if not tensor.equal(expected[name])] == []


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory, servers, renewed, model_path, token_file):
    """The output folder of a run that nothing happens to."""
    config = configured(tmp_path_factory.mktemp("undisturbed"), [servers("stub"), renewed("stub")], model_path)
    began = time.monotonic()
    with chaotic(config, token_file) as process:
        assert process.wait() == 0, logs(config)
    print(f"\nundisturbed: {time.monotonic() - began:.0f} s")
    print("| process | blow | phase | exit codes | steps again | answers again | seconds to the next step |")
    print("| --- | --- | --- | --- | ---: | ---: | ---: |")
    return config.parent / "out"


def help_up(process, struck, who, blow, config, renewed):
    """Let what was stopped go on once that was noticed, and what was killed begin again; return the exit code."""
    if who == "learner" and blow == signal.SIGSTOP:
        wait_until_stopped(process.pid)
        time.sleep(1.2 * standstill_s())  # by the clock: longer than any deadline of it
        process.send_signal(signal.SIGCONT)
    elif who == "server" and blow == signal.SIGKILL:
        struck.process.wait()
        renewed("stub")
    elif who == "server":
        while process.poll() is None and "; 1 servers take part" not in logs(config):
            time.sleep(0.1)
        strike(struck, signal.SIGCONT)
    return process.wait()


@pytest.mark.in_turns(6)
@pytest.mark.parametrize(("who", "blow", "phase"), cells())
def test_killed_or_stopped_process_does_not_change_final_weights(
    tmp_path, servers, renewed, undisturbed, model_path, token_file, who, blow, phase
):
    struck = renewed("stub")
    timeout_s = standstill_s() if blow == signal.SIGSTOP else LONG_S
    config = configured(tmp_path, [servers("stub"), struck], model_path, round(timeout_s))
    with chaotic(config, token_file, phase, int(blow), 0 if who == "learner" else -struck.process.pid) as process:
        codes = [help_up(process, struck, who, blow, config, renewed)]
    if codes[0] != 0:
        assert codes[0] in (75, -signal.SIGKILL), logs(config)
        with chaotic(config, token_file, start=1) as process:
            codes.append(process.wait())
    seconds = seconds_to_next_step(config)
    assert codes[-1] == 0, logs(config)
    assert_same_run(tmp_path / "out", undisturbed)
    steps, answers = done_again(tmp_path / "out")
    print(f"| {who} | {blow.name} | {phase} | {', '.join(map(str, codes))} | {steps} | {answers} | {seconds:.0f} |")


# Certificates


@pytest.fixture(scope="module")
def files(tmp_path_factory):
    return certificates.make(tmp_path_factory.mktemp("tls"))


@pytest.fixture(scope="module")
def guarded(start_module_server, files):
    """A server of https://."""
    return start_module_server("stub", tls=files)


def with_certificates(files, folder, what):
    """The environment of a learner whose certificates are wrong in this way."""
    environment = {**os.environ, **files.environment()}
    missing = {"no authority": TLS_CA_FILE_VARIABLE, "no certificate": TLS_CERT_FILE_VARIABLE}
    if what in missing:
        return environment | {missing[what]: ""}
    if what == "another authority":
        return environment | certificates.make(folder / "another").trust()
    if what == "expired":
        expired = certificates.make(folder / "expired", at=LONG_AGO)
        return environment | expired.environment() | files.trust()
    return environment


@pytest.mark.in_turns(5)
@pytest.mark.parametrize(
    ("wrong", "code", "words"),
    [
        ("another authority", 75, "a stranger answers there"),
        ("no authority", 75, "set STAGE2_TLS_CA_FILE"),
        ("no certificate", 64, "must name a certificate for a server whose base_url is https://"),
        ("expired", 64, "has expired at"),
        ("another name", 75, "its certificate is not for 127.0.0.1"),
    ],
)
def test_learner_with_wrong_certificates_exits_with_reason(
    tmp_path, guarded, files, model_path, token_file, wrong, code, words
):
    host = "127.0.0.1" if wrong == "another name" else certificates.HOST
    reached = replace(guarded, base_url=guarded.base_url.replace(certificates.HOST, host))
    config = configured(tmp_path, [reached], model_path, round(standstill_s()))
    with chaotic(config, token_file, **with_certificates(files, tmp_path, wrong)) as process:
        assert process.wait() == code, logs(config)
    assert words in logs(config)
    assert "Traceback" not in logs(config)
    assert not list((tmp_path / "out").glob("checkpoint-*"))


def test_server_with_expired_certificate_does_not_start(tmp_path, token_file, model_path):
    expired, ports = certificates.make(tmp_path / "expired", at=LONG_AGO), (free_port(), free_port())
    config = run_config(url_of(ports[0], expired), ports[1], model=model_path, dtype="float32")
    served = launch(tmp_path, "stub", config, ports=ports, token=token_file, tls=expired)
    assert served.process.wait() == 64, served.log_tail()
    assert "has expired at" in served.log_tail()


# Strangers


@contextlib.contextmanager
def strangers(token, *ports):
    """Dial these ports again and again: say nothing, nonsense, half a hello, or one of another group.

    Yields a set: the ports where somebody has listened.
    """
    met, over = set(), threading.Event()
    claim = MAGIC + Member(new_group_name(), 1).to_bytes()
    old = claim + link._proof(token, link.WORKER, claim)
    said = itertools.cycle([b"", b"GET / HTTP/1.1\r\n\r\n" * 10, old[:-1], old])

    def dial():
        dialled = collections.deque(maxlen=64)  # those before are closed
        while not over.wait(0.02):
            for port in ports:
                with contextlib.suppress(OSError):
                    dialled.append(socket.create_connection(("127.0.0.1", port), timeout=1))
                    met.add(port)
                    dialled[-1].sendall(next(said))

    thread = threading.Thread(target=dial, daemon=True)
    thread.start()
    yield met
    over.set()
    thread.join()


def test_strangers_at_group_ports_do_not_affect_run(
    tmp_path, servers, renewed, undisturbed, model_path, token, token_file
):
    served = [servers("stub"), renewed("stub")]
    config, ports = configured(tmp_path, served, model_path), [one.group_port for one in served]
    with strangers(token, *ports) as met, chaotic(config, token_file) as process:
        assert process.wait() == 0, logs(config)
    assert met == set(ports)
    assert_same_run(tmp_path / "out", undisturbed)


# Replay


def send_again(port, recorded):
    """Send a server what was sent to it before, connection by connection, and wait for its answers."""
    for said in recorded:
        with socket.create_connection(("127.0.0.1", port)) as dialled, contextlib.suppress(OSError):
            dialled.settimeout(REPLAY_S)  # by the clock: some of its connections stay open
            dialled.sendall(said)
            while dialled.recv(2**16):
                pass


def test_replayed_push_over_tls_has_no_effect(guarded, files, monkeypatch, token, make_sync, base, probe):
    for name, value in files.environment().items():
        monkeypatch.setenv(name, value)
    port, policy = int(guarded.base_url.rpartition(":")[2]), policies.trained(base, "full")
    with recording(port) as recorder:
        reached = replace(guarded, base_url=guarded.base_url.replace(str(port), str(recorder.port)))
        sync, client = make_sync(reached), ServerClient(guarded.base_url, token, timeout_s=patience(60))
        sync.push(base, version=1)
        recorded = [bytes(said) for said in recorder.asked]
        sync.push(policy, version=2)
        assert recorded
        send_again(port, recorded)
        assert client.weight_version() == "2"
        policies.verify(policy, probe, [client], tolerance=FLOAT32_TOLERANCE)
        sync.push(policy, version=3)
    assert client.weight_version() == "3"


def test_replayed_push_with_token_does_not_disturb_next_push(servers, token, make_sync, base, probe):
    served = servers("stub")
    port, policy = int(served.base_url.rpartition(":")[2]), policies.trained(base, "full")
    with recording(port) as recorder:
        sync = make_sync(replace(served, base_url=served.base_url.replace(str(port), str(recorder.port))))
        sync.push(base, version=1)
        recorded = [bytes(said) for said in recorder.asked]
        send_again(port, recorded)
        sync.push(policy, version=2)
    client = ServerClient(served.base_url, token, timeout_s=patience(60))
    policies.verify(policy, probe, [client], tolerance=FLOAT32_TOLERANCE)
    assert client.weight_version() == "2"


# The clock


@pytest.fixture
def untimely(tmp_path, token_file, model_path):
    """A function that starts a stub whose clock jumps by so many seconds at each push."""
    with contextlib.ExitStack() as stack:

        def start(seconds):
            port, log = free_port(), tmp_path / "server.log"
            options = ["--model", str(model_path), "--port", str(port), "--dtype", "float32", "--max-model-len", "1024"]
            code = f"from tests.integration import chaos; chaos.serve_untimely({seconds}, {options!r})"
            environment = {**os.environ, "STAGE2_TOKEN_FILE": str(token_file)}
            with log.open("wb") as output:
                command = [sys.executable, "-c", code]
                process = forked.start(command, imports=forked.STUB, env=environment, stdout=output)
            stack.callback(stop, process)
            served = Served("stub", f"http://127.0.0.1:{port}", free_port(), "float32", log, process)
            wait_until_healthy(served)
            return served

        yield start


@pytest.mark.in_turns(2)
@pytest.mark.parametrize("seconds", [DAY_S, -DAY_S])
def test_clock_jumps_do_not_affect_run(tmp_path, servers, untimely, undisturbed, model_path, token_file, seconds):
    config = configured(tmp_path, [servers("stub"), untimely(seconds)], model_path)
    with chaotic(config, token_file, "ask", CLOCK, seconds) as process:
        assert process.wait() == 0, logs(config)
    assert "leaves; " not in logs(config)
    assert_same_run(tmp_path / "out", undisturbed)
    assert done_again(tmp_path / "out") == (0, 0)


# Links


@pytest.mark.in_turns(2)
@pytest.mark.parametrize("now", ["moved", "empty"])
def test_run_below_symlink_continues_in_folder_that_link_points_to(
    tmp_path, servers, renewed, undisturbed, model_path, token_file, now
):
    """Also when its folder was moved meanwhile; in an empty one it begins again, and leaves the other as it was."""
    (tmp_path / "first").mkdir()
    below = tmp_path / "below"
    below.symlink_to(tmp_path / "first")
    served = [servers("stub"), renewed("stub")]
    config = configured(tmp_path / "run", served, model_path, output_dir=str(below / "out"))
    with chaotic(config, token_file, "train", int(signal.SIGKILL), 0) as process:
        assert process.wait() == -signal.SIGKILL, logs(config)
    if now == "moved":
        (tmp_path / "first").rename(tmp_path / "second")
    else:
        (tmp_path / "second").mkdir()
    below.unlink()
    below.symlink_to(tmp_path / "second")
    with chaotic(config, token_file, start=1) as process:
        assert process.wait() == 0, logs(config)
    assert_same_run(below / "out", undisturbed)
    steps = [one["step"] for one in lines(below / "out" / "stage2_log.jsonl") if one["event"] == "step"]
    assert steps == list(range(1, STEPS + 1))
    if now == "empty":
        assert newest_whole(tmp_path / "first" / "out") == tmp_path / "first" / "out" / "checkpoint-1"
