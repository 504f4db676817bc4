"""DP-SGD in a trainer's own loop: an optimizer with noise, and Poisson batches.

A trainer replaces its optimizer and its loader by the two that `noisy_steps` yields. Opacus
computes the gradients of single records in the model's own backward pass. Each step clips them,
adds noise to their sum, and divides by the expected batch size. The terms and the number of steps
are enforced here. The loss is not: the trainer must make it a mean over records.
"""

from __future__ import annotations

import math
import warnings
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, ClassVar, Final

import torch
from opacus import GradSampleModule
from opacus.grad_sample import compute_linear_grad_sample
from opacus.optimizers import DPOptimizer
from torch import Tensor, nn
from torch.utils.data import DataLoader, Dataset, IterableDataset

from potluck.common.errors import ConfigurationError, TrainingError
from potluck.common.trainer import PrivateTraining

_LONGEST_FACTOR: Final = 1e28
"""Maximum L2 norm of a factor of `OuterProducts`. The other factor is scaled in float32, whose
rounding near zero a longer factor would make larger than any clip."""

_Sampler = Callable[[Any, list[Tensor], Tensor], dict[Any, Tensor]]


@contextmanager
def noisy_steps(
    model: nn.Module, optimizer: torch.optim.Optimizer, data: Any, terms: PrivateTraining
) -> Iterator[tuple[NoisyOptimizer, PoissonBatches]]:
    """Yield an optimizer that adds noise, and a loader of Poisson batches.

    See `TrainerSettings.noisy_steps`. In the block, the model's backward pass also computes the
    gradients of single records. Afterwards the model is an ordinary one.
    """
    _check_parameters(model, optimizer)
    with with_record_gradients(model) as network:
        network.forbid_grad_accumulation()
        noisy = NoisyOptimizer(optimizer, terms)
        yield noisy, PoissonBatches(data, terms, noisy)


@dataclass(frozen=True, slots=True)
class Stacked:
    """The gradients of single records, as they are. values: n × numbers of the parameter."""

    values: Tensor

    def norms(self) -> Tensor:
        """Return each record's L2 norm, n."""
        norms: Tensor = torch.linalg.vector_norm(self.values, dim=1)
        return norms

    def without(self, spoilt: Tensor) -> Stacked:
        """Return the gradients with zeros for the records in the mask `spoilt`."""
        return Stacked(self.values.masked_fill(spoilt[:, None], 0.0))

    def weighted_sum(self, weights: Tensor) -> Tensor:
        """Return the sum over records. weights: one per record."""
        return weights @ self.values


@dataclass(frozen=True, slots=True)
class OuterProducts:
    """The gradients of single records, each an outer product of two vectors; never computed.

    They are those of a linear layer's weight. Both factors together are much smaller than the
    products. left: n × outputs of the layer. right: n × inputs of the layer.
    """

    left: Tensor
    right: Tensor

    def __len__(self) -> int:
        """Return the number of records."""
        return len(self.left)

    def norms(self) -> Tensor:
        """Return each record's L2 norm, n: the product of the norms of the factors.

        It is infinite for a record with a factor longer than `_LONGEST_FACTOR`. In float64, no
        square of a small factor becomes zero and hides a large product.
        """
        norms: list[Tensor] = [
            torch.linalg.vector_norm(each, dim=1, dtype=torch.float64)
            for each in (self.left, self.right)
        ]
        too_long = torch.maximum(*norms) > _LONGEST_FACTOR
        return (norms[0] * norms[1]).masked_fill(too_long, math.inf).to(self.left.dtype)

    def without(self, spoilt: Tensor) -> OuterProducts:
        """Return the gradients with zeros for the records in the mask `spoilt`."""
        left, right = (each.masked_fill(spoilt[:, None], 0.0) for each in (self.left, self.right))
        return OuterProducts(left, right)

    def weighted_sum(self, weights: Tensor) -> Tensor:
        """Return the sum over records, outputs × inputs. weights: one per record."""
        return (self.left * weights[:, None]).T @ self.right


class ClippingOptimizer(DPOptimizer):  # type: ignore[misc]  # its library is not read
    """An optimizer that clips per-record gradients and sums them: one pass for norms, one for sums.

    A record whose gradient has no finite norm adds nothing. Otherwise it would make the sum NaN,
    which would reveal the record.
    """

    def __init__(
        self,
        optimizer: torch.optim.Optimizer,
        *,
        noise_multiplier: float,
        clip: float,
        expected_batch: float,
        generator: torch.Generator | None,
    ) -> None:
        """Its step takes `optimizer`'s step. expected_batch: mean number of records of a batch."""
        size: Any = expected_batch  # divides the sum; Opacus only expects an integer
        super().__init__(
            optimizer,
            noise_multiplier=noise_multiplier,
            max_grad_norm=clip,
            expected_batch_size=size,
            generator=generator,
            secure_mode=True,  # adds several draws, against attacks on floating-point noise
        )

    @property
    def trained(self) -> list[Any]:
        """Return the parameters. Opacus adds `grad_sample` and `summed_grad` to each."""
        return list(self.params)

    @property
    def grad_samples(self) -> list[Any]:
        """Return the gradients of single records, a tensor or `OuterProducts` per parameter."""
        return [each.grad_sample for each in self.trained]

    @property
    def accumulated_iterations(self) -> int:
        """Return the number of backward passes whose mean is a step; others are refused."""
        return 1

    def clip_and_accumulate(self) -> None:
        """Add each record's gradient, scaled down to the clip, to the step's sum."""
        gradients = [
            each if isinstance(each, OuterProducts) else Stacked(each.flatten(1))
            for each in self.grad_samples
        ]
        norms = torch.stack([each.norms() for each in gradients]).norm(dim=0)
        factors = (self.max_grad_norm / (norms + 1e-6)).clamp(max=1.0)
        spoilt = ~norms.isfinite()
        if bool(spoilt.any()):
            factors[spoilt] = 0.0
            gradients = [each.without(spoilt) for each in gradients]
        for parameter, each in zip(self.trained, gradients, strict=True):
            total = each.weighted_sum(factors).view_as(parameter)
            before = parameter.summed_grad
            parameter.summed_grad = total if before is None else before.add_(total)


class NoisyOptimizer(ClippingOptimizer):
    """An optimizer whose steps have noise and are recorded. Allows one step for each batch drawn.

    Its `step` raises ConfigurationError if a gradient is not one per record, and TrainingError for
    a step without a batch.
    """

    def __init__(self, optimizer: torch.optim.Optimizer, terms: PrivateTraining) -> None:
        device = optimizer.param_groups[0]["params"][0].device
        super().__init__(
            optimizer,
            noise_multiplier=terms.noise_multiplier,
            clip=terms.clip,
            expected_batch=terms.expected_batch,
            generator=terms.generator(str(device)),
        )
        self._terms = terms
        self._sizes: deque[int] = deque()

    def expect(self, records: int) -> None:
        """Allow one more step, for a batch of this many records."""
        self._sizes.append(records)

    def step_without_records(self) -> None:
        """Take the step of an empty batch, which is only noise."""
        self._sizes.appendleft(0)
        for each in self.trained:
            each.grad_sample = None
        self.step()

    def pre_step(self, closure: Callable[[], float] | None = None) -> Any:
        """Clip, add noise, and record the step; called by `step`."""
        del closure
        if not self._sizes:
            raise TrainingError(
                "`noisy_steps` got no batch for this step of the optimizer; take exactly one "
                "step for each batch of the loader"
            )
        self._check_gradients(self._sizes.popleft())
        self._terms.record()
        done = super().pre_step()
        for each in self.trained:
            each.grad_sample = each.summed_grad = None
        return done

    def _check_gradients(self, records: int) -> None:
        """Set the gradients of parameters that the loss does not use to zero.

        Raises ConfigurationError if a gradient does not have exactly one entry per record."""
        if records and all(each.grad_sample is None for each in self.trained):
            raise ConfigurationError(
                "the backward pass gave no gradients of single records; call `backward` once per "
                "step, on a loss of the model that `noisy_steps` received"
            )
        for each in self.trained:
            found = each.grad_sample
            if found is None:
                each.grad_sample = each.new_zeros((records, *each.shape))
            elif not isinstance(found, Tensor | OuterProducts) or len(found) != records:
                raise ConfigurationError(
                    "the model does not give one gradient per record: the first dimension of a "
                    "layer is not the batch; don't merge the batch dimension with positions or "
                    "tokens, or remove [privacy]"
                )


class PoissonBatches:
    """A loader of Poisson samples of a data set, until the granted steps are used up.

    Each pass has ⌈1 / sampling rate⌉ draws. An empty draw is not yielded: the optimizer takes a
    step of noise alone.
    """

    def __init__(self, data: Any, terms: PrivateTraining, optimizer: NoisyOptimizer) -> None:
        """data: a `DataLoader`, whose `collate_fn` and workers are used, or a `Dataset`."""
        self.dataset: Any = data if isinstance(data, Dataset) else getattr(data, "dataset", data)
        if isinstance(self.dataset, IterableDataset) or not hasattr(self.dataset, "__getitem__"):
            raise ConfigurationError(
                f"a {type(self.dataset).__name__} can't be sampled, but noise for single records "
                "needs sampling; use a Dataset with __len__ and __getitem__, or remove [privacy]"
            )
        self._options = {
            name: getattr(data, name)
            for name in ("collate_fn", "num_workers", "worker_init_fn")
            if data is not self.dataset and hasattr(data, name)
        }
        self._terms, self._optimizer = terms, optimizer
        self._generator = terms.generator()
        self._left = terms.steps

    def __len__(self) -> int:
        """Return the number of draws of a pass."""
        return math.ceil(round(1 / self._terms.sampling_rate, 9))

    def __iter__(self) -> Iterator[Any]:
        """Yield the batches of one pass."""
        drawn = [self._draw() for _ in range(min(len(self), self._left))]
        batches = iter(
            DataLoader(
                self.dataset, batch_sampler=[each for each in drawn if each], **self._options
            )
        )
        for indices in drawn:
            self._left -= 1
            if indices:
                batch = next(batches)
                self._optimizer.expect(len(indices))
                yield batch
            else:
                self._optimizer.step_without_records()

    def _draw(self) -> list[int]:
        drawn = torch.rand(len(self.dataset), generator=self._generator, dtype=torch.float64)
        chosen: list[int] = (drawn < self._terms.sampling_rate).nonzero()[:, 0].tolist()
        return chosen


def _check_parameters(model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    """Raise ConfigurationError unless the optimizer has all trainable parameters of the model."""
    moved = {id(each) for group in optimizer.param_groups for each in group["params"]}
    trainable = {id(each) for each in model.parameters() if each.requires_grad}
    if not trainable or not trainable <= moved:
        raise ConfigurationError(
            "the optimizer lacks trainable parameters of the model, which would get no noise; "
            "give all parameters to one optimizer, or freeze them with requires_grad_(False)"
        )


def _without_copy(sampler: _Sampler) -> _Sampler:
    """Wrap a function that computes per-record gradients, so that Opacus need not copy its
    result."""

    def sample(layer: Any, activations: list[Tensor], backprops: Tensor) -> dict[Any, Tensor]:
        rest = {}
        for parameter, gradients in sampler(layer, activations, backprops).items():
            used_before = hasattr(parameter, "_current_grad_sample")
            if used_before or len(gradients) != layer.max_batch_len or not parameter.requires_grad:
                rest[parameter] = gradients
            else:
                parameter._current_grad_sample = gradients
        return rest

    return sample


def _of_linear(layer: Any, activations: list[Tensor], backprops: Tensor) -> dict[Any, Any]:
    """Return the gradients of a linear layer; as outer products for inputs of two dimensions.

    A weight that is used more than once in a pass has a sum of outer products instead.
    """
    given = activations[0]
    used_once = layer.weight.requires_grad and layer.weight._forward_counter == 1
    used_once = used_once and not hasattr(layer.weight, "_current_grad_sample")
    if given.dim() != 2 or given.dtype != backprops.dtype or not used_once:
        found: dict[Any, Tensor] = compute_linear_grad_sample(layer, activations, backprops)
        return found
    gradients: dict[Any, Any] = {layer.weight: OuterProducts(backprops, given)}
    if layer.bias is not None:
        gradients[layer.bias] = backprops
    return gradients


class _RecordGradients(GradSampleModule):  # type: ignore[misc]  # its library is not read
    """A model whose backward passes also compute the gradients of single records."""

    GRAD_SAMPLERS: ClassVar[dict[type[nn.Module], _Sampler]] = {
        kind: _without_copy(_of_linear if kind is nn.Linear else sampler)
        for kind, sampler in GradSampleModule.GRAD_SAMPLERS.items()
    }


@contextmanager
def with_record_gradients(model: nn.Module) -> Iterator[GradSampleModule]:
    """Wrap the model while the block runs: its backward passes compute per-record gradients."""
    with warnings.catch_warnings():
        # Skip the gradient of the inputs: they are data.
        warnings.filterwarnings("ignore", message="Full backward hook is firing")
        network = _RecordGradients(model)
        try:
            yield network
        finally:
            network.to_standard_module()
            for each in model.parameters():
                each.grad = None
