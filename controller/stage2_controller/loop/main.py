"""`python -m stage2_controller`: runs the controller against the cluster of KUBECONFIG, else of its service account."""

import argparse
import gc
import logging
import os
import sys
from collections.abc import Sequence
from pathlib import Path

from stage2_api import log_lines
from stage2_controller.job.settings import DEFAULT_IMAGE, Settings, read_policy
from stage2_controller.loop import operator
from stage2_controller.loop.controller import Options

OBJECTS_OF_A_COLLECTION = 50_000
"""Objects that are created, and not freed, between two collections of cycles: some 10 MB."""
DEEPEST_OBJECT = 10_000
"""Levels of nesting up to which an API server accepts an object (its decoder's limit)."""


def main(arguments: Sequence[str] | None = None) -> None:
    """Parse the command line and run until SIGTERM or SIGINT."""
    # Objects of Kubernetes are many small dictionaries without cycles: the collector would search them all the time and
    # find nothing. Imported modules stay.
    gc.set_threshold(OBJECTS_OF_A_COLLECTION, *gc.get_threshold()[1:])
    gc.freeze()
    # Whatever anybody stores must be decoded: an object that cannot be would end every list and watch. Jobs that are
    # nested too deep are refused afterwards. The json of Python 3.12 and 3.13 has limits of its own: 1,500 levels
    # before 3.12.3, just under DEEPEST_OBJECT since. The image has 3.11.
    sys.setrecursionlimit(10 * DEEPEST_OBJECT)
    options = _parser().parse_args(arguments)
    log_lines.configure(options.log_level.upper())
    for chatty in ("kopf.objects", "kopf.activities", "aiohttp.access"):  # a line for each watch event and each probe
        logging.getLogger(chatty).setLevel(logging.WARNING)
    failure = operator.run(
        Settings(
            image=options.image,
            namespace=os.environ.get("STAGE2_NAMESPACE"),
            progress_s=options.progress_seconds,
            policy=options.policy,
            kueue=options.kueue,
            nodes_may_come=options.nodes_may_come == "true",
        ),
        Options(
            namespaces=tuple(options.namespace or ()),
            concurrency=options.concurrency,
            placement=options.placement,
            lease=options.lease,
            listen=options.listen,
            tls=options.tls,
        ),
    )
    if failure:
        sys.exit(failure)


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m stage2_controller", description=__doc__)
    parser.add_argument("--namespace", action="append", help="serve this namespace; may be repeated (default: all)")
    parser.add_argument(
        "--image",
        default=os.environ.get("STAGE2_DEFAULT_IMAGE", DEFAULT_IMAGE),
        help="image of jobs that name none (default: $STAGE2_DEFAULT_IMAGE, else %(default)s)",
    )
    parser.add_argument(
        "--policy",
        type=read_policy,
        default=os.environ.get("STAGE2_POLICY", "{}"),
        metavar="JSON",
        help="what jobs may use, as the chart's values under `policy` (default: $STAGE2_POLICY, else %(default)s)",
    )
    parser.add_argument(
        "--concurrency", type=int, default=Options.concurrency, help="passes at a time (default: %(default)s)"
    )
    parser.add_argument(
        "--no-placement",
        dest="placement",
        action="store_false",
        help="let the scheduler choose nodes: needs no permission to see them",
    )
    parser.add_argument(
        "--nodes-may-come",
        choices=("true", "false"),
        default="true",
        help="whether jobs that fit nowhere have pending pods, for an autoscaler to see (default: %(default)s)",
    )
    parser.add_argument("--kueue", action="store_true", help="write a Kueue Workload for jobs that name a queue")
    parser.add_argument(
        "--progress-seconds",
        type=float,
        default=Settings.progress_s,
        help="how often a running learner is polled (default: %(default)s)",
    )
    parser.add_argument(
        "--listen",
        metavar="HOST:PORT",
        type=_address,
        help="serve /healthz, /readyz and /metrics here, e.g. 0.0.0.0:8080",
    )
    parser.add_argument("--tls", metavar="FOLDER", type=Path, help="serve them over TLS, by its tls.crt and tls.key")
    parser.add_argument(
        "--lease",
        metavar="NAMESPACE/NAME",
        type=_lease,
        help="work only while this Lease is held: for more than one replica",
    )
    parser.add_argument("--log-level", default="info", choices=("debug", "info", "warning", "error"))
    return parser


def _address(text: str) -> tuple[str, int]:
    host, _, port = text.rpartition(":")
    return host, int(port)


def _lease(text: str) -> tuple[str, str]:
    namespace, name = text.split("/")
    return namespace, name
