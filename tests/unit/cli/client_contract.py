"""What `stage2.Job` does on any API server that has the definition: the real one, and that of `job_api.py`."""

from pathlib import Path

import pytest

from stage2 import Job, RequestRefused
from stage2_api.errors import ConfigError


def a_job_is_submitted_listed_suspended_resumed_and_deleted(file: Path, namespace: str) -> None:
    job = Job.from_file(file, namespace=namespace).submit()
    assert job.status().phase is None
    assert [one.name for one, _ in Job.list(namespace=namespace)] == [job.name]
    assert (job.name, namespace) in {(one.name, one.namespace) for one, _ in Job.list(all_namespaces=True)}
    before = job.read()["metadata"]["generation"]
    assert job.suspend().read()["spec"]["suspend"] is True
    assert job.submit().read()["spec"]["suspend"] is True, "the file does not say whether it is"
    assert job.resume().read()["spec"]["suspend"] is False
    assert job.read()["metadata"]["generation"] == before + 2
    assert job.events() == []
    job.delete()


def names_lead_to_no_other_object(namespace: str) -> None:
    for ask in (Job.read, Job.suspend, Job.delete, Job.events, Job.logs):
        with pytest.raises(RequestRefused, match='"lost" not found'):
            ask(Job("lost", namespace))
    for name in ("", ".", "..", "a/b", "a?b"):
        with pytest.raises(ConfigError, match=r"metadata\.name"):
            Job(name, namespace)
    with pytest.raises(ConfigError, match=r"metadata\.namespace"):
        Job("mine", "..")
