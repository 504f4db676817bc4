"""Layers on stacked weights, with gradients in closed form instead of autograd.

In a small network, calls to torch take nearly all the time of a step, and autograd doubles their
number. Here each layer keeps the values that its gradient needs, and writes the gradient into a
given tensor. For ten lanes of 16 samples, `benchmarks/lane_gradients.py` measured 2.2 times the
speed of autograd on stacked weights for a perceptron 64-32-10, 0.9 times for 784-200-10, and 1.1
times for LeNet-5. The layers stay for the small networks, with which most simulations are run; the
larger ones use the same code, since two ways to compute a gradient would give two results.

Activations are lanes × samples × …. `forward` is called once, then `backward` once, in reverse
order of the layers. Autograd is off (`torch.no_grad`).
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from typing import cast

import torch
from torch import Tensor, nn
from torch.nn import functional

Masks = Callable[[float, torch.Size], Tensor]
"""Function that returns dropout's factors, given the share to drop and the shape of the
activations, lanes × samples × …."""


class LaneLayer(ABC):
    """A layer in use. first: True if no earlier layer needs the gradient of its inputs."""

    @abstractmethod
    def forward(self, inputs: Tensor, masks: Masks) -> Tensor:
        """Return the layer's outputs; the inputs may be overwritten."""

    @abstractmethod
    def backward(self, gradient: Tensor, *, first: bool) -> Tensor:
        """Write the gradient of the weights and return the gradient of the inputs.

        `gradient`: gradient of the layer's outputs; may be overwritten."""


class LaneLinear(LaneLayer):
    """A linear layer of all lanes, as one batched matrix product."""

    def __init__(self, weights: Sequence[Tensor], gradients: Sequence[Tensor]) -> None:
        """weights: lanes × out × in, and lanes × out for a bias; gradients: tensors of the same
        shapes.
        """
        self._weight, self._turned = weights[0], weights[0].transpose(1, 2)
        self._bias = weights[1].unsqueeze(1) if len(weights) == 2 else None
        self._of_weight = gradients[0]
        self._of_bias = gradients[1] if len(gradients) == 2 else None
        self._rows = torch.empty(0)
        self._shape = torch.Size()

    def forward(self, inputs: Tensor, masks: Masks) -> Tensor:  # noqa: ARG002  part of the interface
        """Multiply the rows by the weights and add the bias."""
        self._shape = inputs.shape
        rows = self._rows = inputs if inputs.dim() == 3 else inputs.flatten(1, -2)
        if self._bias is None:
            outputs = torch.bmm(rows, self._turned)
        else:
            outputs = torch.baddbmm(self._bias, rows, self._turned)
        return outputs if inputs.dim() == 3 else outputs.view(*inputs.shape[:-1], -1)

    def backward(self, gradient: Tensor, *, first: bool) -> Tensor:
        """Compute the gradients of the product."""
        rows = gradient if gradient.dim() == 3 else gradient.flatten(1, -2)
        torch.bmm(rows.transpose(1, 2), self._rows, out=self._of_weight)
        if self._of_bias is not None:
            torch.sum(rows, 1, out=self._of_bias)
        if first:
            return gradient
        return torch.bmm(rows, self._weight).view(self._shape)


class LaneByLane(LaneLayer):
    """A sequence of layers that begins with a convolution, computed one lane after the other.

    On a CPU this is faster than grouped convolutions, and one lane's feature maps stay in the
    cache.
    """

    def __init__(self, stretches: Sequence[Sequence[LaneLayer]]) -> None:
        """stretches: one sequence of layers per lane; activations have no lane dimension."""
        self._stretches = stretches

    def forward(self, inputs: Tensor, masks: Masks) -> Tensor:
        """Return the stacked outputs of all lanes."""
        found: list[Tensor] = []
        for stretch, each in zip(self._stretches, inputs.unbind(), strict=True):
            maps = each.contiguous(memory_format=torch.channels_last)  # for fast pooling
            for layer in stretch:
                maps = layer.forward(maps, masks)
            found.append(maps)
        return torch.stack([each.contiguous() for each in found])

    def backward(self, gradient: Tensor, *, first: bool) -> Tensor:
        """Compute the gradients lane by lane."""
        found: list[Tensor] = []
        for stretch, each in zip(self._stretches, gradient.unbind(), strict=True):
            maps = each.contiguous(memory_format=torch.channels_last)
            for place in range(len(stretch) - 1, -1, -1):
                maps = stretch[place].backward(maps, first=first and place == 0)
            found.append(maps)
        return gradient if first else torch.stack(found)


class Convolution(LaneLayer):
    """A convolution layer of one lane."""

    def __init__(
        self, layer: nn.Conv2d, weights: Sequence[Tensor], gradients: Sequence[Tensor]
    ) -> None:
        """weights: the lane's kernels and bias, if any; gradients: tensors of these shapes."""
        self._weights, self._gradients = weights, gradients
        self._bias = weights[1] if len(weights) == 2 else None
        self._of_bias = None if self._bias is None else [layer.out_channels]
        self._how = (
            _pair(layer.stride),
            _pair(cast(tuple[int, ...], layer.padding)),
            _pair(layer.dilation),
        )
        self._groups = layer.groups
        self._inputs = torch.empty(0)

    def forward(self, inputs: Tensor, masks: Masks) -> Tensor:  # noqa: ARG002  part of the interface
        """Return the convolution of the inputs."""
        self._inputs = inputs
        return torch.conv2d(inputs, self._weights[0], self._bias, *self._how, self._groups)

    def backward(self, gradient: Tensor, *, first: bool) -> Tensor:
        """Compute the gradients of the convolution."""
        found = torch.ops.aten.convolution_backward(
            gradient,
            self._inputs,
            self._weights[0],
            self._of_bias,
            *self._how,
            False,
            [0, 0],
            self._groups,
            [not first, True, self._bias is not None],
        )
        for target, each in zip(self._gradients, found[1:], strict=False):
            target.copy_(each)
        return gradient if first else cast(Tensor, found[0])


class GroupedConvolution(LaneLayer):
    """All lanes as one grouped convolution, fast on a GPU; autograd computes its gradients."""

    def __init__(
        self, layer: nn.Conv2d, weights: Sequence[Tensor], gradients: Sequence[Tensor]
    ) -> None:
        """weights: kernels and, if there is one, bias, stacked by lane; gradients: tensors of the
        same shapes.
        """
        self._layer = layer
        self._weights, self._gradients = weights, gradients
        self._recorded: tuple[list[Tensor], Tensor] | None = None

    def forward(self, inputs: Tensor, masks: Masks) -> Tensor:  # noqa: ARG002  part of the interface
        """Convolve all lanes at once; lanes are groups of channels."""
        layer, lanes = self._layer, len(inputs)
        with torch.enable_grad():
            leaves = [each.detach().requires_grad_() for each in (inputs, *self._weights)]
            maps = leaves[0].transpose(0, 1).flatten(1, 2)
            outputs = functional.conv2d(
                maps,
                leaves[1].flatten(0, 1),
                leaves[2].flatten() if len(leaves) == 3 else None,
                layer.stride,
                layer.padding,
                layer.dilation,
                lanes * layer.groups,
            )
            found = outputs.view(len(outputs), lanes, -1, *outputs.shape[2:]).transpose(0, 1)
        self._recorded = leaves, found
        return found.detach()

    def backward(self, gradient: Tensor, *, first: bool) -> Tensor:
        """Compute the gradients with autograd."""
        assert self._recorded is not None  # noqa: S101  # after `forward`
        leaves, outputs = self._recorded
        self._recorded = None
        wanted = leaves[1:] if first else [*leaves[1:], leaves[0]]
        found = torch.autograd.grad(outputs, wanted, gradient)
        for target, each in zip(self._gradients, found, strict=False):
            target.copy_(each)
        return gradient if first else found[-1]


class LaneRelu(LaneLayer):
    """max(x, 0)."""

    def __init__(self, *, in_place: bool) -> None:
        """in_place: True if the inputs may be overwritten, because no other layer needs them."""
        self._relu = torch.relu_ if in_place else torch.relu
        self._outputs = torch.empty(0)

    def forward(self, inputs: Tensor, masks: Masks) -> Tensor:  # noqa: ARG002  part of the interface
        """Return max(x, 0)."""
        self._outputs = self._relu(inputs)
        return self._outputs

    def backward(self, gradient: Tensor, *, first: bool) -> Tensor:  # noqa: ARG002  part of the interface
        """Return the gradient where the input was positive, else 0."""
        return cast(Tensor, torch.ops.aten.threshold_backward(gradient, self._outputs, 0))


class LaneMaxPool(LaneLayer):
    """Max pooling of each sample's maps; also works on one lane without a lane dimension."""

    def __init__(self, layer: nn.MaxPool2d) -> None:
        self._how = (
            _pair(layer.kernel_size),
            _pair(layer.stride),
            _pair(layer.padding),
            _pair(layer.dilation),
            layer.ceil_mode,
        )
        self._inputs = self._places = torch.empty(0)
        self._lanes = False

    def forward(self, inputs: Tensor, masks: Masks) -> Tensor:  # noqa: ARG002  part of the interface
        """Return the maximum of each window."""
        self._lanes = inputs.dim() == 5
        self._inputs = inputs.flatten(0, 1) if self._lanes else inputs
        outputs, self._places = torch.ops.aten.max_pool2d_with_indices(self._inputs, *self._how)
        return (
            torch.unflatten(outputs, 0, inputs.shape[:2]) if self._lanes else cast(Tensor, outputs)
        )

    def backward(self, gradient: Tensor, *, first: bool) -> Tensor:  # noqa: ARG002  part of the interface
        """Add each gradient at the position of its window's maximum."""
        shape = gradient.shape[:2]
        found: Tensor = torch.ops.aten.max_pool2d_with_indices_backward(
            gradient.flatten(0, 1) if self._lanes else gradient,
            self._inputs,
            *self._how,
            self._places,
        )
        return torch.unflatten(found, 0, shape) if self._lanes else found


class LaneFlatten(LaneLayer):
    """Flattens each sample into a row."""

    def __init__(self) -> None:
        self._shape = torch.Size()

    def forward(self, inputs: Tensor, masks: Masks) -> Tensor:  # noqa: ARG002  part of the interface
        """Return each sample as a row."""
        self._shape = inputs.shape
        return inputs.flatten(2)

    def backward(self, gradient: Tensor, *, first: bool) -> Tensor:  # noqa: ARG002  part of the interface
        """Return the gradient in the shape of the inputs."""
        return gradient.view(self._shape)


class LaneDropout(LaneLayer):
    """Dropout with masks that each lane draws for itself."""

    def __init__(self, share: float) -> None:
        self._share = share
        self._factors = torch.empty(0)

    def forward(self, inputs: Tensor, masks: Masks) -> Tensor:
        """Set a share of the inputs to zero and scale up the others."""
        self._factors = masks(self._share, inputs.shape)
        return inputs * self._factors

    def backward(self, gradient: Tensor, *, first: bool) -> Tensor:  # noqa: ARG002  part of the interface
        """Multiply the gradient by the factors of the forward pass."""
        return gradient.mul_(self._factors)


class PlainLayer(LaneLayer):
    """A layer without weights that treats each sample by itself; autograd differentiates it."""

    def __init__(self, layer: nn.Module) -> None:
        self._layer = layer
        self._recorded: tuple[Tensor, Tensor] | None = None

    def forward(self, inputs: Tensor, masks: Masks) -> Tensor:  # noqa: ARG002  part of the interface
        """Apply the layer to all lanes as one large batch."""
        with torch.enable_grad():
            leaf = inputs.detach().requires_grad_()
            maps = leaf.flatten(0, 1)
            # copy: other layers may need the inputs that it overwrites
            if getattr(self._layer, "inplace", False):
                maps = maps.clone()
            outputs: Tensor = self._layer(maps)
            outputs = outputs.view(*inputs.shape[:2], *outputs.shape[1:])
        self._recorded = leaf, outputs
        return outputs.detach()

    def backward(self, gradient: Tensor, *, first: bool) -> Tensor:  # noqa: ARG002  part of the interface
        """Compute the gradient with autograd."""
        assert self._recorded is not None  # noqa: S101  # after `forward`
        leaf, outputs = self._recorded
        self._recorded = None
        return torch.autograd.grad(outputs, leaf, gradient)[0]


def _pair(numbers: int | tuple[int, ...] | None) -> list[int]:
    """Return values for height and width as a list, the form that kernels take; None gives []."""
    if numbers is None:
        return []
    return [numbers, numbers] if isinstance(numbers, int) else list(numbers)
