"""Options of a job: each target honours an option, visibly in what it sends, or refuses it by name."""

import json
import re
from dataclasses import fields, replace

import pytest

from tpukit.cloud.gcloud import boot_script, create_words
from tpukit.cloud.options import REFUSED, check_plan, largest_cost
from tpukit.cloud.skypilot import job_yaml
from tpukit.cloud.target import JobOptions, JobPlan
from tpukit.cloud.vertex import custom_job
from tpukit.profiling import find_tpu

RESERVATION = "projects/demo/zones/us-west4-a/reservations/mine"
SECRET = "projects/demo/secrets/hf/versions/latest"
VALUES = {
    "zone": "us-west4-b",
    "region": "europe-west4",
    "project": "other-project",
    "spot": True,
    "reservation": "any",
    "image": "us-docker.pkg.dev/demo/kit/trainer:1",
    "service_account": "trainer@demo.iam.gserviceaccount.com",
}
OF_THE_RUNNER = {
    "torch",
    "grace",
    "not_secret",
}  # the same on every machine; tests/cloud/test_job.py
ZONE = JobOptions(zone="us-west4-a")


def plan(target, *, options=None, **others):
    options = options or (ZONE if target == "gcloud" else JobOptions())
    tpu = None if target == "local" else find_tpu("v5e-8")
    folder = "/jobs/train-1" if target == "local" else "gs://demo-bucket/jobs/train-1"
    made = JobPlan(
        "train-1",
        target,
        folder,
        tpu,
        timeout=7200.0,
        python="3.12",
        digest="ab" * 32,
        options=options,
    )
    return replace(made, **others)


def sent(plan):
    """Return all that a target sends for a plan, as text."""
    if plan.target == "vertex":
        return json.dumps(custom_job(plan))
    if plan.target == "skypilot":
        return job_yaml(plan)
    handle = {
        "name": plan.name,
        "zone": plan.options.zone,
        "project": plan.options.project or "demo",
    }
    return " ".join(create_words(plan, handle)) + boot_script(plan, handle)


@pytest.mark.parametrize("option", [field.name for field in fields(JobOptions)])
@pytest.mark.parametrize("target", list(REFUSED))
def test_an_option_changes_what_is_sent_or_is_refused_by_name(target, option):
    if option in OF_THE_RUNNER:
        assert option not in REFUSED[target]
        return
    value = RESERVATION if (target, option) == ("vertex", "reservation") else VALUES[option]
    before = plan(target)
    given = replace(before, options=replace(before.options, **{option: value}))
    if option in REFUSED[target]:
        with pytest.raises(
            ValueError,
            match=f"^{option}=.* is not supported by the target {target}\n  found: .*\n  fix:",
        ):
            check_plan(given)
        return
    check_plan(given)
    if target == "vertex" and option in ("project", "region"):
        return  # parts of the address: tests/cloud/test_vertex.py
    assert sent(given) != sent(before)


@pytest.mark.parametrize("target", ["vertex", "gcloud", "skypilot"])
def test_every_target_gets_the_time_limit_and_ends_the_machine_ten_minutes_after_it(target):
    check_plan(plan(target))
    assert "7800" in sent(plan(target))
    assert "7800" not in sent(plan(target, timeout=3600.0))


@pytest.mark.parametrize(
    ("target", "changes", "words"),
    [
        ("vertex", {"folder": "/tmp/jobs/train-1"}, "needs a bucket"),
        ("gcloud", {"folder": "gs://My_Bucket"}, "needs a bucket"),
        ("skypilot", {"tpu": None}, "skypilot needs a chip"),
        ("vertex", {"tpu": find_tpu("v4-8")}, "Vertex AI does not train on v4-8"),
        ("gcloud", {"options": JobOptions()}, "needs the zone"),
        ("gcloud", {"options": replace(ZONE, reservation="mine")}, "only `gcloud alpha` selects"),
        ("gcloud", {"options": replace(ZONE, reservation="any", spot=True)}, "exclude each other"),
        ("vertex", {"options": JobOptions(reservation="mine")}, "takes the full name"),
        (
            "skypilot",
            {"options": JobOptions(zone="us-west4-a", region="europe-west4")},
            "us-west4-a is not in region='europe-west4'",
        ),
        ("vertex", {"timeout": 59.0}, "a limit of a minute or more"),
        ("vertex", {"timeout": float("inf")}, "a limit of a minute or more"),
        ("gcloud", {"name": "My Job"}, "is not a valid name of a job"),
        ("gcloud", {"name": "a" * 41}, "is not a valid name of a job"),
        ("gcloud", {"name": "train-"}, "does not end with a hyphen"),
        ("gcloud", {"options": JobOptions(zone="us-west4-a; rm -rf /")}, "is not a valid zone"),
        ("gcloud", {"options": replace(ZONE, project="$(reboot)")}, "is not a valid project"),
        (
            "gcloud",
            {"options": replace(ZONE, image="python:3.12 sh -c reboot")},
            "is not a valid image",
        ),
        ("gcloud", {"options": replace(ZONE, image="--privileged")}, "is not a valid image"),
        (
            "vertex",
            {"options": JobOptions(service_account="me@gmail.com")},
            "is not a valid service_account",
        ),
        (
            "vertex",
            {"secrets": {"HF_TOKEN": "hf_" + "a" * 34}},
            "never sends secrets as plain text",
        ),
        ("gcloud", {"secrets": {"HF_TOKEN": "env:HF_TOKEN"}}, "projects/my-project/secrets/hf"),
        ("skypilot", {"secrets": {"HF_TOKEN": SECRET}}, "env:HF_TOKEN"),
        ("local", {"secrets": {"A B": "env:A"}}, "'A B', which is not a name of an environment"),
    ],
)
def test_what_would_fail_or_be_ignored_later_is_refused_before_anything_is_sent(
    target, changes, words
):
    with pytest.raises(ValueError, match="fix:") as caught:
        check_plan(plan(target, **changes))
    assert words in str(caught.value)
    assert "hf_a" not in str(caught.value), "the message has the secret"


@pytest.mark.parametrize(
    ("target", "options"),
    [
        ("vertex", JobOptions(zone="us-west4-a")),
        ("vertex", JobOptions(region="us west4")),
        ("gcloud", JobOptions()),
        ("gcloud", JobOptions(region="us-west4")),
        ("gcloud", JobOptions(zone="a zone")),
        ("skypilot", JobOptions(zone="a zone")),
    ],
)
def test_the_fix_of_an_option_is_an_argument_of_submit(target, options):
    with pytest.raises(ValueError, match="fix:") as caught:
        check_plan(plan(target, options=options))
    fix = re.search(r"options=(JobOptions\(.*?\))", str(caught.value))[1]
    check_plan(plan(target, options=eval(fix)))


def test_the_largest_cost_is_the_price_times_the_time_limit():
    line = largest_cost(plan("vertex", timeout=36000.0))
    assert line.startswith(
        "about $9.60 per hour (Compute Engine's list prices in the US, November 2026)"
    )
    assert "at most 10 h, $96.00" in line
    assert "nothing" in largest_cost(plan("local"))
