"""Check the options of a job against its target, and compute the largest possible cost.

    spot        vertex: passed on    gcloud: passed on    skypilot: passed on    local: refused
    zone        vertex: refused      gcloud: required     skypilot: passed on    local: refused

If a target cannot pass an option on to its platform, `submit` raises an error before it sends
anything. No option is ignored.
"""

import re
from dataclasses import fields

from tpukit.cloud.machines import MACHINE_SPECS
from tpukit.cloud.target import BACKSTOP_SECONDS, JobOptions, JobPlan
from tpukit.essentials.display import InvalidValueError
from tpukit.essentials.environment import PRICES_OF
from tpukit.profiling import find_tpu

SHORTEST_TIMEOUT = 60  # seconds

_OF_SKYPILOT = ("SkyPilot takes it from its own configuration", "set it in ~/.sky/config.yaml")
# For each target, the options that it does not support, each with the reason and the fix.
REFUSED = {
    "vertex": {
        "zone": (
            "a Vertex AI job has a region and no zone",
            'options=JobOptions(region="us-west4")',
        ),
    },
    "gcloud": {
        "region": ("a TPU VM is created in a zone", 'options=JobOptions(zone="us-west4-a")'),
    },
    "skypilot": {
        "project": _OF_SKYPILOT,
        "service_account": _OF_SKYPILOT,
        "reservation": (
            "SkyPilot does not support reservations of TPU VMs",
            'to="vertex", or to="gcloud" with options=JobOptions(reservation="any")',
        ),
    },
    "local": dict.fromkeys(
        ("zone", "region", "project", "spot", "reservation", "image", "service_account"),
        (
            "the local target starts the job on this machine",
            "leave it out, or choose another target",
        ),
    ),
}

# Regular expressions. A region is, for example, us-west4. A project may begin with a domain, as in
# example.com:my-project.
_REGION = "[a-z]+(-[a-z]+)+[0-9]+"
_PROJECT = r"([a-z0-9.-]+:)?[a-z0-9]([a-z0-9-]*[a-z0-9])?"
# For each option, the pattern that its value must match, and an example. Values become parts of
# shell commands, so nothing else is accepted.
_PATTERNS = {
    "zone": (f"{_REGION}-[a-z0-9]+", "us-west4-a"),
    "region": (_REGION, "us-central1"),
    "project": (_PROJECT, "my-project"),
    "service_account": (
        "[^@\\s'\"$`]+@[a-z0-9.-]+[.]gserviceaccount[.]com",
        "trainer@my-project.iam.gserviceaccount.com",
    ),
    "image": ("[a-z0-9][A-Za-z0-9._/:@-]*", "us-docker.pkg.dev/my-project/images/trainer:1"),
}
_NAME = "[a-z]([a-z0-9-]{0,38}[a-z0-9])?"
_BUCKET = "gs://[a-z0-9][a-z0-9._-]{1,61}[a-z0-9](/[A-Za-z0-9._-]+)+"
_VARIABLE = "[A-Za-z_][A-Za-z0-9_]*"
_RESERVATION = f"projects/{_PROJECT}/zones/{_REGION}-[a-z0-9]+/reservations/[a-z0-9-]+"
_OF_SECRET_MANAGER = "projects/[^/\\s]+/secrets/[A-Za-z0-9_-]+/versions/([0-9]+|latest)"
_SECRETS = {
    "vertex": (_OF_SECRET_MANAGER, "projects/my-project/secrets/hf/versions/latest"),
    "gcloud": (_OF_SECRET_MANAGER, "projects/my-project/secrets/hf/versions/latest"),
    "skypilot": (f"env:{_VARIABLE}", "env:HF_TOKEN"),
    "local": (f"env:{_VARIABLE}", "env:HF_TOKEN"),
}


def check_plan(plan: JobPlan) -> None:
    """Check all options of a plan against its target.

    Raises:
        InvalidValueError: an option is not valid, or the target does not support it.
    """
    if not re.fullmatch(_NAME, plan.name):
        raise InvalidValueError(
            f"{plan.name!r} is not a valid name of a job",
            found="a name has lower-case letters, digits and hyphens, begins with a letter, does "
            "not end with a hyphen, and has at most 40 characters",
            fix='name="train-1"',
        )
    _check_refused(plan)
    for option, (pattern, example) in _PATTERNS.items():
        given = getattr(plan.options, option)
        if given is not None and not re.fullmatch(pattern, given):
            fact = f"{given!r} is not a valid {option} of Google Cloud"
            raise InvalidValueError(fact, fix=f'options=JobOptions({option}="{example}")')
    _check_reservation(plan)
    _check_zone(plan.options)
    _check_machine(plan)
    _check_secrets(plan)
    if not SHORTEST_TIMEOUT <= plan.timeout < float("inf"):
        raise InvalidValueError(
            f"timeout={plan.timeout:g} s is not supported: a job needs a limit of a minute or more",
            found="the time limit bounds the cost of the job",
            fix='timeout="8h"',
        )


def _check_refused(plan: JobPlan) -> None:
    for field in fields(JobOptions):
        given = getattr(plan.options, field.name)
        if given == field.default or field.name not in REFUSED[plan.target]:
            continue
        reason, fix = REFUSED[plan.target][field.name]
        raise InvalidValueError(
            f"{field.name}={given!r} is not supported by the target {plan.target}",
            found=reason,
            fix=fix,
        )


def _check_reservation(plan: JobPlan) -> None:
    reservation = plan.options.reservation
    if reservation is None:
        return
    if plan.options.spot:
        raise InvalidValueError(
            "spot and reservation exclude each other",
            found=f"spot=True, reservation={reservation!r}",
            fix="leave one of them out",
        )
    if plan.target == "gcloud" and reservation != "any":
        raise InvalidValueError(
            f"reservation={reservation!r} is not supported by the target gcloud",
            found="only `gcloud alpha` selects a reservation of TPUs by its name",
            fix='use any matching reservation in the zone: options=JobOptions(reservation="any")',
        )
    if plan.target == "vertex" and not re.fullmatch(_RESERVATION, reservation):
        raise InvalidValueError(
            f"reservation={reservation!r} is not a valid reservation of Vertex AI",
            found="Vertex AI takes the full name",
            fix='options=JobOptions(reservation="projects/my-project/zones/us-west4-a/'
            'reservations/my-reservation")',
        )


def _check_zone(options: JobOptions) -> None:
    """Raise InvalidValueError if the zone is not in the region; only skypilot supports both."""
    region = options.region
    if options.zone and region and options.zone.rpartition("-")[0] != region:
        raise InvalidValueError(
            f"the zone {options.zone} is not in region={region!r}",
            fix="leave one of them out",
        )


def _check_machine(plan: JobPlan) -> None:
    """Raise InvalidValueError for a missing chip, zone or bucket, or a chip the target lacks."""
    if plan.target == "local":
        if "://" in plan.folder:
            raise InvalidValueError(
                'to="local" keeps its jobs in a folder of this machine',
                found=f"bucket={plan.folder.rpartition('/')[0]!r}",
                fix='bucket="jobs"',
            )
        return
    if plan.tpu is None:
        raise InvalidValueError(f"the target {plan.target} needs a chip", fix='chip="v5e-8"')
    if plan.target == "vertex":
        # Raises for a TPU that Vertex AI does not have.
        find_tpu(plan.tpu.name, among=MACHINE_SPECS, without="Vertex AI does not train on")
    if plan.target == "gcloud" and plan.options.zone is None:
        raise InvalidValueError(
            "the target gcloud needs the zone of the TPU VM",
            fix='options=JobOptions(zone="us-west4-a"), or another zone with quota',
        )
    if not re.fullmatch(_BUCKET, plan.folder):
        raise InvalidValueError(
            f"the target {plan.target} needs a bucket for the results of the job",
            found=f"the folder of this job would be {plan.folder!r}",
            fix='bucket="gs://my-bucket/jobs"',
        )


def _check_secrets(plan: JobPlan) -> None:
    pattern, example = _SECRETS[plan.target]
    for name, reference in plan.secrets.items():
        fix = f'secrets={{"HF_TOKEN": "{example}"}}'
        if not re.fullmatch(_VARIABLE, name):
            fact = f"secrets= has {name!r}, which is not a name of an environment variable"
            raise InvalidValueError(fact, fix=fix)
        if not re.fullmatch(pattern, reference):
            # Do not print the reference, because the user may have passed the secret itself.
            raise InvalidValueError(
                f"the value of {name!r} in secrets= must say where the target {plan.target} "
                "finds the secret",
                found="the value has another form, and tpukit never sends secrets as plain text",
                fix=fix,
            )


def largest_cost(plan: JobPlan) -> str:
    """Return one line with the price per hour and the largest possible cost of a job."""
    if plan.target == "local" or plan.tpu is None:
        return "nothing: it runs on this machine"
    hours = plan.timeout / 3600
    most = hours * plan.tpu.dollars
    more = BACKSTOP_SECONDS / 3600 * plan.tpu.dollars
    price = f"about ${plan.tpu.dollars:.2f} per hour ({PRICES_OF})"
    backstop = f"${more:,.2f} more if it does not end within {BACKSTOP_SECONDS // 60} min"
    return f"{price}; at most {hours:g} h, ${most:,.2f}, and {backstop}"
