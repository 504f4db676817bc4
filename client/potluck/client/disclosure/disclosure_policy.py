"""Checks requests against the owner's rules on which data may leave a client. Pure functions."""

from __future__ import annotations

from fractions import Fraction
from typing import Annotated, Literal

from pydantic import Field, field_validator

from potluck.client.disclosure.laplace import exact_epsilon, sensitivity
from potluck.client.disclosure.weightings import is_masked
from potluck.common.disclosure import (
    BUILT_IN_SIGNALS,
    LABEL_COUNTS,
    LEAST_HOSTS,
    ROUNDS_PER_EPOCH,
    RUNS_PER_EPOCH,
    SMALLEST_LEAST_HOSTS,
    TRIPLET,
    Adjacency,
    Mode,
    NoisyOrExact,
    Parameters,
    Request,
    TaskReference,
    Weighting,
)
from potluck.common.errors import (
    DataError,
    DisclosureRefusedError,
    NotFiniteError,
    OutOfBoundsError,
    PotluckError,
    TrainingError,
)
from potluck.common.learning.spread import LEAST_GROUP, SMALLEST_GROUP
from potluck.common.learning.step_by_step import LABEL_DISTANCE, UNSAFE_STEPWISE
from potluck.common.settings.configuration import Settings
from potluck.common.settings.old_spelling import old_spellings
from potluck.common.settings.plugins import SIGNALS, installed
from potluck.common.signal import title_of
from potluck.rpc.v1 import coordinator_pb2 as rpc

MOST_RELEASES = 1000
"""Maximum number of disclosures of a client in total; it limits the size of its ledger."""

_SKETCH = "sketch"
AVAILABILITY = "availability"
WITHHELD = "its data can't be used for this; the log of its host has the reason"
_TABLE = "the [disclosure] table of the host's configuration"
_OF_DATA = (TrainingError, NotFiniteError, OutOfBoundsError)
"""Errors that can depend on single samples."""

SumName = Annotated[
    Literal["total", "cells", "unsafe-stepwise"], old_spellings({"protocol": "unsafe-stepwise"})
]
"""Name of a kind of secure sums in a host's configuration."""


class DisclosurePolicy(Settings):
    """The rules for all clients of a host. Each client has its own privacy budget."""

    signals: tuple[str, ...] = Field(
        default=(LABEL_COUNTS, TRIPLET),
        description="Signals that clients may disclose: label_counts (samples per class),\n"
        "triplet (class imbalance, attribute imbalance and spurious correlation),\n"
        "interaction_matrix (samples per class and attribute), or those of installed packages.\n"
        "interaction_matrix has no noisy form: it discloses exact counts.",
    )
    exact_signals: tuple[str, ...] = Field(
        default=(),
        description="Signals of installed packages, among `signals`, that clients may disclose\n"
        "without noise.",
    )
    exact_label_counts: bool = Field(
        default=False, description="True to allow label counts without noise."
    )
    triplet: NoisyOrExact = Field(
        default="noisy",
        description="noisy: triplets are computed from an interaction matrix with noise. exact:\n"
        "triplets without noise are also allowed. For two classes, an exact triplet reveals the\n"
        "matrix, except for the names of its rows and columns.",
    )
    epsilon: float = Field(
        default=1.0,
        gt=0,
        allow_inf_nan=False,
        description="Privacy loss ε of each noisy disclosure. Smaller: more noise. Runs that ask\n"
        "for a larger ε are refused.",
    )
    epsilon_budget: float = Field(
        default=4.0,
        ge=0,
        allow_inf_nan=False,
        description="Maximum privacy loss ε of all noisy disclosures of a client together, over\n"
        "all versions of its data and all runs.",
    )
    adjacency: Adjacency = Field(
        default="replace",
        description="Change in a client's data that the noise hides: replace (one sample is\n"
        "replaced by another; the number of samples is public) or add-remove (one sample is\n"
        'added or removed; holds only with weighting = "equal").',
    )
    weighting: Weighting = Field(
        default=Weighting.EXACT,
        description="Precision with which the number of samples is sent with an update: exact,\n"
        "bucketed (a power of two) or equal (not sent). Runs that ask for a more precise number\n"
        "are refused.",
    )
    updates: Literal["open", "masked", "private"] = Field(
        default="open",
        description="Form in which a client's update leaves this host. open: as the run asks\n"
        "for. masked: only in a secure sum over at least sum_hosts hosts; runs without\n"
        "secure_aggregation are refused. private: only from a training with noise, within\n"
        "training_epsilon; runs without [privacy] are refused.",
    )
    verified_selection: bool = Field(
        default=False,
        description="True to train only in runs whose cohorts this host recomputes. Runs without\n"
        "selection.hosts_verify are then refused.",
    )
    training_epsilon: float = Field(
        default=8.0,
        ge=0,
        allow_inf_nan=False,
        description="Maximum privacy loss ε of all trainings with noise on one data_epoch,\n"
        "over all runs and coordinators. It limits the loss of each record, and the loss of\n"
        "the client if the noise hides whole updates. The host refuses a training that would\n"
        'exceed it. Trainings without noise are not counted; updates = "private" refuses them.',
    )
    training_delta: float = Field(
        default=1e-5,
        gt=0,
        le=0.01,
        description="Probability δ that the privacy loss of trainings exceeds training_epsilon.\n"
        "Choose it well below 1 / number of records.",
    )
    total_epsilon: float | None = Field(
        default=None,
        ge=0,
        allow_inf_nan=False,
        description="Maximum privacy loss ε of a record by all disclosures with noise together,\n"
        "in any order: profiles, sums, and trainings and answers on one data_epoch.\n"
        "epsilon_budget and training_epsilon still apply. Unset: only these two apply.",
    )
    sets_per_model: Literal["one", "any"] = Field(
        default="one",
        description="Number of different sets of clients in which a client's updates of one\n"
        "model may be summed: one or any. Two sums over nearly the same clients reveal a\n"
        'single update. With "any", they can also reveal updates of other clients.',
    )
    masked_runs: int = Field(
        default=RUNS_PER_EPOCH,
        ge=1,
        le=1_000_000,
        description="Maximum number of runs with masked updates on one data_epoch. Sums of\n"
        "several runs with different settings can reveal single samples: the more runs, the less\n"
        "the masks protect.",
    )
    masked_rounds: int = Field(
        default=ROUNDS_PER_EPOCH,
        ge=1,
        le=1_000_000_000,
        description="Maximum number of rounds with masked updates on one data_epoch, over all\n"
        "runs.",
    )
    held_out_counts: bool = Field(
        default=False,
        description="True to allow evaluation on held-out samples, for tasks in which clients\n"
        "hold samples out. The counts that a host sends reveal the number of held-out samples\n"
        "per class.",
    )
    least_group: int = Field(
        default=LEAST_GROUP,
        ge=SMALLEST_GROUP,
        description="Minimum number of clients over which the coordinator may show the spread of\n"
        "metrics on held-out samples. Runs with a smaller evaluation.least_group are refused.",
    )
    questions: tuple[str, ...] = Field(
        default=(),
        description='Questions of selectors that clients may answer: "loss" (mean loss of the\n'
        'coordinator\'s model; pow-d), "context" (losses on training samples and held-out\n'
        'samples; flash), "gradient-norm" (norm of the model\'s gradient; feel, ocs), "sketch"\n'
        '(22 sums over a local update, which takes a training; hcsfed), "label-entropy"\n'
        '(evenness of labels, estimated from a local update; hics-fl), "soft-label" (mean\n'
        "predictions of the trained model; fedentropy), or those of installed packages. In\n"
        "runs with [privacy], answers have noise and are charged to training_epsilon. Without\n"
        "noise, a coordinator that chooses the model can compute the samples per class from\n"
        "ten answers.\n"
        '"availability" (the plan in [availability]; refl) discloses nothing about data.',
    )
    sums: tuple[SumName, ...] = Field(
        default=("total", "cells"),
        description="Secure sums of label counts in which the clients take part: total (over the\n"
        "federation) and cells (over random groups of clients). The coordinator learns only the\n"
        "sums. Secure sums need member_key, members and federation_root.\n"
        "unsafe-stepwise: sums over any group, one after another, and the question\n"
        "label-distance, as in the paper on DC selection. These reveal each client's exact\n"
        "counts; allow them only if the data need no protection.",
    )
    exact_sums: bool = Field(
        default=False,
        description="True to allow the sums `total` and `cells` without noise. A party that knows\n"
        "all other clients' counts can compute the last client's counts from a sum without noise.\n"
        "Each version of the data is used in only one such sum.",
    )
    sum_hosts: int = Field(
        default=LEAST_HOSTS,
        ge=SMALLEST_LEAST_HOSTS,
        description="Minimum number of distinct hosts in a secure sum. Fewer than 5 give little\n"
        "protection against hosts that collude with the coordinator. The groups of `cells` have\n"
        "at least 7 hosts if there are enough, and never fewer than this minimum.",
    )
    sum_colluding_hosts: int | None = Field(
        default=None,
        ge=0,
        description="Number of hosts assumed to collude with the coordinator. Larger: more\n"
        "clients must answer in each sum. Unset: a third of the hosts.",
    )
    data_epoch: int = Field(
        default=1,
        ge=1,
        lt=2**53,
        description="Version of the clients' data. Increase it when the data have changed, so\n"
        "that clients disclose them again. The privacy budget already spent remains spent.",
    )

    simulation_seed: int | None = Field(
        default=None,
        ge=0,
        description="Seed of the noise, so that a run can be repeated; only for experiments on\n"
        "data that need no protection. Anyone who knows the seed can remove the noise.",
    )

    @field_validator("signals", "exact_signals")
    @classmethod
    def _installed(cls, names: tuple[str, ...]) -> tuple[str, ...]:
        known = installed(SIGNALS)
        for name in names:
            if name not in known:
                raise ValueError(f"'{name[:40]}' is not installed; installed: {', '.join(known)}")
        return names

    @property
    def training_limit(self) -> float:
        """Maximum ε that trainings and answers may spend on one data epoch.

        If profiles and sums have spent much of `total_epsilon`, less is available."""
        if self.total_epsilon is None:
            return self.training_epsilon
        return min(self.training_epsilon, self.total_epsilon)

    @property
    def together_limit(self) -> float:
        """Maximum privacy loss ε of a record from all disclosures with noise."""
        parts = self.epsilon_budget + self.training_epsilon
        return parts if self.total_epsilon is None else min(self.total_epsilon, parts)

    @property
    def allows_stepwise(self) -> bool:
        """True if the clients take part in sums that disclose their label counts."""
        return UNSAFE_STEPWISE in self.sums

    @property
    def undermined(self) -> bool:
        """True if disclosing the number of samples undoes the noise under `add-remove`."""
        return self.adjacency == "add-remove" and self.weighting is not Weighting.EQUAL


def terms(
    policy: DisclosurePolicy,
    client: str,
    signal: str,
    request: Request,
    *,
    task: TaskReference,
    model: str | None,
) -> Parameters:
    """Return the parameters of a permitted disclosure. `model`: BLAKE3 digest, for a triplet.

    Raises DisclosureRefusedError, naming the key of the policy that forbids it.
    """
    check_signal(policy, client, signal)
    if request.mode is Mode.EXACT and signal == LABEL_COUNTS and not policy.exact_label_counts:
        raise _refused(
            client, signal, "the run requests exact counts, but `exact_label_counts` is false"
        )
    if request.mode is Mode.EXACT_TRIPLET and policy.triplet != "exact":
        raise _refused(
            client, signal, 'the run requests it without noise, but `triplet` is "noisy"'
        )
    if not request.mode.adds_noise:
        if signal not in (*BUILT_IN_SIGNALS, *policy.exact_signals):
            raise _refused(
                client,
                signal,
                f"the run requests it without noise, but `exact_signals` does not list '{signal}'",
            )
        return Parameters(mode=request.mode, task=task, model=model, settings=request.settings)
    epsilon = policy.epsilon if request.epsilon is None else request.epsilon
    if exact_epsilon(epsilon) > exact_epsilon(policy.epsilon):
        raise _refused(
            client, signal, f"the run requests ε = {epsilon:g}, but `epsilon` is {policy.epsilon:g}"
        )
    adjacency = request.adjacency or policy.adjacency
    if sensitivity(adjacency) < sensitivity(policy.adjacency):
        raise _refused(
            client,
            signal,
            f"the run requests the adjacency '{adjacency}', but `adjacency` is "
            f"'{policy.adjacency}'",
        )
    return Parameters(
        mode=request.mode,
        task=task,
        epsilon=epsilon,
        adjacency=adjacency,
        model=model,
        settings=request.settings,
    )


def check_signal(policy: DisclosurePolicy, client: str, signal: str) -> None:
    """Raise DisclosureRefusedError if a signal may not be disclosed at all."""
    if signal not in policy.signals:
        why = f"`signals` does not list '{signal}'"
        if signal in BUILT_IN_SIGNALS:
            raise _refused(client, signal, why)
        # Name the signal, not its title: reading the title would load code that the owner forbids.
        raise DisclosureRefusedError(
            f"client '{client}' does not disclose a signal: {why} in {_TABLE}",
            client=client,
            signal=signal,
        )


def check_budget(
    policy: DisclosurePolicy,
    client: str,
    signal: str,
    parameters: Parameters,
    *,
    spent: Fraction,
    releases: int,
    room: Fraction | None = None,
) -> None:
    """Raise DisclosureRefusedError if one more release exceeds the client's budget.

    Privacy losses add up (sequential composition), over data epochs too: successive versions of
    data mostly hold the same samples. `releases`: number of releases so far, noisy or not. `room`:
    remaining ε of `total_epsilon`, after trainings and answers; None if that is unset.
    """
    if releases >= MOST_RELEASES:
        raise _refused(client, signal, f"{releases} disclosures were made; no more are possible")
    if parameters.epsilon is None:
        return
    budget = Fraction(repr(policy.epsilon_budget))
    if spent + exact_epsilon(parameters.epsilon) > budget:
        raise _refused(
            client,
            signal,
            f"ε = {float(spent):g} has been spent, and {parameters.epsilon:g} more would exceed "
            f"`epsilon_budget` = {policy.epsilon_budget:g}",
        )
    if room is not None and exact_epsilon(parameters.epsilon) > room:
        raise _refused(client, signal, "its ε would exceed the remaining `total_epsilon`")


def check_weighting(policy: DisclosurePolicy, client: str, asked: Weighting) -> None:
    """Raise DisclosureRefusedError if a run wants a more exact number of samples than allowed."""
    if not policy.weighting.permits(asked):
        raise DisclosureRefusedError(
            f"client '{client}' reports its number of samples at most as '{policy.weighting}', "
            f"but the run asks for '{asked}'; set weighting = \"{policy.weighting}\" in the run "
            "file",
            client=client,
            asked=asked.value,
        )


def check_pace(policy: DisclosurePolicy, client: str, pace: float) -> None:
    """Raise DisclosureRefusedError if simulated seconds would disclose the number of samples.

    pace: seconds for each sample, 0 on a real clock.
    """
    if pace and policy.weighting is not Weighting.EXACT:
        raise DisclosureRefusedError(
            f"client '{client}' reports its number of samples at most as '{policy.weighting}', "
            f"but simulated seconds ({pace:g} s per sample) disclose the exact number; remove "
            "[virtual_clock] from the run file",
            client=client,
        )


def check_correction(policy: DisclosurePolicy, client: str, name: str) -> None:
    """Raise DisclosureRefusedError if a correction sends tensors that disclose the sample count.

    SCAFFOLD's control variate is the update divided by the number of steps. That number depends on
    the number of samples unless the run sets it.
    """
    if policy.weighting is Weighting.EXACT:
        return
    raise DisclosureRefusedError(
        f"client '{client}' reports its number of samples at most as '{policy.weighting}', but "
        f"'{name[:40]}' discloses the number of steps unless updates are masked; set "
        "training.steps or secure_aggregation in the run file, or choose another strategy",
        client=client,
    )


def without_data(
    instruction: rpc.Instruction, error: PotluckError, policy: DisclosurePolicy
) -> PotluckError:
    """Return the error that may be sent to the coordinator.

    A disclosure, an answer, a secure sum or a masked training protects the data. If it fails
    because of the data, the reason is one fixed sentence: any detail would disclose facts about
    single samples.
    """
    work = instruction.WhichOneof("work")
    masked = work == "train" and is_masked(instruction.train)
    private = work == "train" and instruction.train.HasField("privacy")
    always = work in ("disclose", "question", "secure")
    protected = masked or private or always or policy.updates != "open"
    return DataError(WITHHELD) if protected and isinstance(error, _OF_DATA) else error


def check_updates(
    policy: DisclosurePolicy, client: str, *, masked: bool, private: bool = False
) -> None:
    """Raise DisclosureRefusedError if the owner's `updates` setting forbids these updates.

    The setting may require masked updates (`masked`), or updates from trainings with noise
    (`private`).
    """
    if policy.updates == "private" and not private:
        raise DisclosureRefusedError(
            f"client '{client}' trains with noise only: `updates` is \"private\" in {_TABLE}; "
            "add [privacy] to the run file",
            client=client,
        )
    if policy.updates == "masked" and not masked:
        raise DisclosureRefusedError(
            f"client '{client}' sends masked updates only: `updates` is \"masked\" in {_TABLE}; "
            "set secure_aggregation = true in the run file",
            client=client,
        )


def check_selection(policy: DisclosurePolicy, client: str, *, verified: bool) -> None:
    """Raise DisclosureRefusedError if the owner requires selections that this host recomputes.

    verified: True if the training claims to follow such a selection.
    """
    if policy.verified_selection and not verified:
        raise DisclosureRefusedError(
            f"client '{client}' trains only if its host can recompute the selection: "
            f"`verified_selection` is true in {_TABLE}; set verifiable = true and hosts_verify = "
            "true in [selection] of the run file",
            client=client,
        )


def check_tuning(policy: DisclosurePolicy, client: str) -> None:
    """Raise DisclosureRefusedError unless the owner lets clients train a received model without
    noise, and then measure it."""
    if policy.updates == "private":
        raise DisclosureRefusedError(
            f"client '{client}' does not measure models after training without noise: `updates` is "
            f'"private" in {_TABLE}; set evaluation.fine_tune_epochs = 0 in the run file',
            client=client,
        )


def check_held_out(policy: DisclosurePolicy, client: str, *, least_group: int = 0) -> None:
    """Raise DisclosureRefusedError if models may not be evaluated on held-out samples.

    least_group: minimum number of clients over which the spread of their metrics is shown; 0 if no
    spread is shown.
    """
    if not policy.held_out_counts:
        raise DisclosureRefusedError(
            f"client '{client}' does not evaluate models: `held_out_counts` is false in {_TABLE}; "
            "set evaluation.every = 0 in the run file, or held_out_counts = true there",
            client=client,
        )
    if 0 < least_group < policy.least_group:
        raise DisclosureRefusedError(
            f"client '{client}' does not evaluate models for a spread over {least_group} clients: "
            f"`least_group` is {policy.least_group} in {_TABLE}; set evaluation.least_group = "
            f"{policy.least_group} in the run file, or evaluation.spread = false",
            client=client,
        )


def check_question(
    policy: DisclosurePolicy, client: str, kind: str, *, noisy: bool = False
) -> None:
    """Raise DisclosureRefusedError if the owner does not allow this kind of question.

    noisy: True if the answer has noise that hides single records. `label-distance` is part of the
    `unsafe-stepwise` sums, so it is allowed exactly if they are.
    """
    if kind == LABEL_DISTANCE:
        if UNSAFE_STEPWISE not in policy.sums:
            raise DisclosureRefusedError(
                f"client '{client}' does not answer '{kind}', which would disclose its label "
                f'counts: `sums` in {_TABLE} does not list "{UNSAFE_STEPWISE}"',
                client=client,
                question=kind,
            )
    elif kind not in policy.questions:
        allowed = ", ".join(policy.questions) or "none"
        raise DisclosureRefusedError(
            f"client '{client}' does not answer the question '{kind[:40]}': `questions` in "
            f"{_TABLE} lists: {allowed}; add the question there, or choose a selector that does "
            "not ask it",
            client=client,
            question=kind[:40],
        )
    elif policy.updates == "private" and not noisy and kind not in (AVAILABILITY, _SKETCH):
        raise DisclosureRefusedError(
            f"client '{client}' answers '{kind[:40]}' with noise only: `updates` is \"private\" in "
            f"{_TABLE}; add [privacy] to the run file",
            client=client,
            question=kind[:40],
        )
    elif kind == _SKETCH and policy.updates != "open":
        without = "masks" if policy.updates == "masked" else "noise"
        raise DisclosureRefusedError(
            f"client '{client}' does not answer the question '{kind}', whose answer contains "
            f'sums of an update without {without}: `updates` is "{policy.updates}" in '
            f"{_TABLE}; choose a selector that does not ask it",
            client=client,
            question=kind,
        )


def _refused(client: str, signal: str, why: str) -> DisclosureRefusedError:
    return DisclosureRefusedError(
        f"client '{client}' does not disclose its {title_of(signal)}: {why} in {_TABLE}",
        client=client,
        signal=signal,
    )
