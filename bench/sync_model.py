"""A weight sync of Qwen3-VL-8B over real networks, modelled, not measured: its bytes, and constants of this machine.

Two ways: the adapter is sent and servers merge it, or the learner merges and sends the layers that it touches. Learner
and servers are machines of their own behind one card of the learner's; what a side does while it sends costs nothing
where sending takes longer.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

HIDDEN, KEYS, WIDE, LAYERS = 4096, 1024, 12288, 36  # Qwen3-VL-8B-Instruct's config.json, text_config
LINEAR = (
    (HIDDEN, HIDDEN),  # (out, in) of q, k, v, o, gate, up, down
    (KEYS, HIDDEN),
    (KEYS, HIDDEN),
    (HIDDEN, HIDDEN),
    (WIDE, HIDDEN),
    (WIDE, HIDDEN),
    (HIDDEN, WIDE),
)
RANK = 16
SENT_AS, SERVED_AS = 4, 2  # bytes: PEFT trains adapters in float32, servers hold bfloat16
NETWORKS = {"1 Gbit/s": 1e9 / 8, "10 Gbit/s": 1e10 / 8, "100 Gbit/s": 1e11 / 8}  # bytes a second
SERVERS = (1, 3)


@dataclass(frozen=True)
class Constants:
    """What was measured on this machine's CPU: nanoseconds of one thread a weight, bytes a second, seconds.

    merge: DoRA of rank 16, 4096 x 4096 (`bench/run merge`). prove: its digest. read: of the folder, and loading. link:
    what one link moves, encrypted, over loopback. control: the calls of a sync.
    """

    merge_ns: float = 1.4
    prove_ns: float = 0.1
    read_ns: float = 0.4
    link: float = 1.7e9
    control_s: float = 0.02


MEASURED = Constants()


@dataclass(frozen=True)
class Modelled:
    """One sync, in seconds. server: merged at the servers. learner: merged at the learner, what changed is sent."""

    server: float
    learner: float

    @property
    def ratio(self) -> float:
        """How many times faster the merge at the servers is."""
        return self.learner / self.server


def adapter_bytes(rank: int = RANK) -> int:
    """Bytes of a DoRA adapter of every linear layer of the language model: A, B and magnitudes."""
    return SENT_AS * LAYERS * sum(rank * (out + width) + out for out, width in LINEAR)


def touched_weights() -> int:
    """Weights of the layers that it touches."""
    return LAYERS * sum(out * width for out, width in LINEAR)


def modelled(network: float, servers: int, threads: float, constants: Constants = MEASURED) -> Modelled:
    """Return the times of one sync.

    network: bytes a second that leave the learner. threads: by so many times a side merges, reads and proves faster
    than one CPU thread; infinity = the network alone.
    """

    def sent(nbytes: int) -> float:
        return max(servers * nbytes / network, nbytes / constants.link)

    seconds = touched_weights() * 1e-9 / threads
    made = seconds * (constants.merge_ns + constants.prove_ns + constants.read_ns)  # the learner's own takes less
    merged, loaded = seconds * constants.merge_ns, seconds * constants.read_ns
    server = sent(adapter_bytes()) + made
    learner = max(sent(SERVED_AS * touched_weights()), merged, loaded)
    return Modelled(server + constants.control_s, learner + constants.control_s)


class ModelTable:
    """The table, in Markdown."""

    def lines(self) -> Iterator[str]:
        """The table's lines."""
        sizes = f"{adapter_bytes() / 1e6:.0f} MB of adapter, {SERVED_AS * touched_weights() / 1e9:.1f} GB of layers"
        yield "\n## Weight sync of Qwen3-VL-8B, modelled, not measured\n\n"
        yield f"DoRA of rank {RANK}, every linear layer of the language model: {sizes}.\n"
        yield f"Seconds; {MEASURED}. 16 threads are taken to be 16 times as fast as one.\n"
        yield "A GPU's merge was not measured; `nothing` is what the network alone would allow it.\n\n"
        yield "| network | servers | each side merges by | merged at the servers | what changed is sent | ratio |\n"
        yield "| --- | ---: | --- | ---: | ---: | ---: |\n"
        for name, network in NETWORKS.items():
            for servers in SERVERS:
                for how, threads in (("1 CPU thread", 1), ("16 CPU threads", 16), ("nothing", float("inf"))):
                    one = modelled(network, servers, threads)
                    yield f"| {name} | {servers} | {how} | {one.server:.2f} | {one.learner:.2f} | {one.ratio:.1f} |\n"
