"""A network whose layers work on several sets of weights at once, a lane for each client.

Made of the layers of a `torch.nn.Sequential`. Where a layer has weights, they are stacked: one more
dimension in front, of lanes. Fully connected layers then are one batched product. Convolutions go
lane by lane on a CPU, where grouped ones are slower, and are one grouped convolution on a GPU. All
else does not care whose samples it sees.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import cast

import torch
from torch import Tensor, nn
from torch.nn import functional

from potluck.client.training.task_training import UnfitForLanesError

Masks = Callable[[float, torch.Size], Tensor]
"""Dropout's factors for activations of a shape: lanes × samples × …."""
_Step = Callable[[Sequence[Tensor], Tensor, Masks], Tensor]

_PLAIN = (
    nn.ReLU,
    nn.LeakyReLU,
    nn.ELU,
    nn.GELU,
    nn.SiLU,
    nn.Tanh,
    nn.Sigmoid,
    nn.Identity,
    nn.MaxPool2d,
    nn.AvgPool2d,
    nn.AdaptiveAvgPool2d,
)
"""Layers without weights that treat each sample by itself."""


class LaneNetwork:
    """The layers of a network on stacked weights.

    names: of the stacked tensors, in the order in which `forward` wants them.
    """

    def __init__(self, network: nn.Module) -> None:
        """Raises UnfitForLanesError for a network with other layers than those known here."""
        self.names: list[str] = []
        self._steps: list[_Step] = []
        self.drops = False
        """Whether it has dropout, whose masks each lane draws for itself."""
        for name, layer in _layers(network, ""):
            self._add(name, layer)
        parameters = {name for name, each in network.named_parameters() if each.requires_grad}
        if parameters != set(self.names) or set(network.state_dict()) != parameters:
            raise UnfitForLanesError("some of the network's tensors are shared, fixed or buffers")

    def forward(self, weights: Sequence[Tensor], inputs: Tensor, masks: Masks) -> Tensor:
        """Logits, lanes × samples × classes. weights: stacked, as `names`. inputs: lanes × samples
        × …."""
        for step in self._steps:
            inputs = step(weights, inputs, masks)
        return inputs

    def _add(self, name: str, layer: nn.Module) -> None:
        if type(layer) is nn.Linear:
            self._steps.append(_linear(*self._weights(name, layer)))
        elif type(layer) is nn.Conv2d:
            self._steps.append(_convolution(layer, *self._weights(name, layer)))
        elif type(layer) is nn.Flatten and (layer.start_dim, layer.end_dim) == (1, -1):
            self._steps.append(lambda _weights, inputs, _masks: inputs.flatten(2))
        elif type(layer) is nn.Dropout:
            self._steps.append(_dropout(layer.p))
            self.drops = self.drops or layer.p > 0
        elif type(layer) in _PLAIN:
            self._steps.append(_plain(layer))
        else:
            raise UnfitForLanesError(f"the network has a {type(layer).__name__}")

    def _weights(self, name: str, layer: nn.Module) -> tuple[int, int | None]:
        """Where a layer's weight and bias will be."""
        self.names.append(f"{name}weight")
        place = len(self.names) - 1
        if layer.bias is None:
            return place, None
        self.names.append(f"{name}bias")
        return place, place + 1


def stacked(state: Mapping[str, Tensor], names: Sequence[str], lanes: int) -> list[Tensor]:
    """The same weights in every lane, by name: lanes × …."""
    return [
        state[name].detach().unsqueeze(0).repeat(lanes, *[1] * state[name].dim()) for name in names
    ]


def _layers(network: nn.Module, prefix: str) -> Iterator[tuple[str, nn.Module]]:
    if type(network) is not nn.Sequential:
        raise UnfitForLanesError(f"the network is a {type(network).__name__}, not layers in a row")
    for name, layer in network.named_children():
        if type(layer) is nn.Sequential:
            yield from _layers(layer, f"{prefix}{name}.")
        else:
            yield f"{prefix}{name}.", layer


def _linear(weight: int, bias: int | None) -> _Step:
    def step(weights: Sequence[Tensor], inputs: Tensor, _masks: Masks) -> Tensor:
        turned = weights[weight].transpose(1, 2)
        rows = inputs.flatten(1, -2)
        if bias is None:
            outputs = torch.bmm(rows, turned)
        else:
            outputs = torch.baddbmm(weights[bias].unsqueeze(1), rows, turned)
        return outputs.view(*inputs.shape[:-1], -1)

    return step


def _convolution(layer: nn.Conv2d, weight: int, bias: int | None) -> _Step:
    if layer.padding_mode != "zeros" or isinstance(layer.padding, str):
        raise UnfitForLanesError("the network pads its convolutions in another way")
    shape = {"stride": layer.stride, "padding": layer.padding, "dilation": layer.dilation}

    def convolve(inputs: Tensor, kernels: Tensor, biases: Tensor | None, groups: int) -> Tensor:
        return functional.conv2d(inputs, kernels, biases, groups=groups, **shape)

    def one_by_one(weights: Sequence[Tensor], inputs: Tensor, _masks: Masks) -> Tensor:
        biases = None if bias is None else weights[bias].unbind()
        kernels = weights[weight].unbind()
        outputs = [
            convolve(each, kernels[lane], None if biases is None else biases[lane], layer.groups)
            for lane, each in enumerate(inputs.unbind())
        ]
        return torch.stack(outputs)

    def grouped(weights: Sequence[Tensor], inputs: Tensor, _masks: Masks) -> Tensor:
        lanes = len(inputs)
        maps = inputs.transpose(0, 1).flatten(1, 2)
        biases = None if bias is None else weights[bias].flatten()
        outputs = convolve(maps, weights[weight].flatten(0, 1), biases, lanes * layer.groups)
        return outputs.view(len(outputs), lanes, -1, *outputs.shape[2:]).transpose(0, 1)

    def step(weights: Sequence[Tensor], inputs: Tensor, masks: Masks) -> Tensor:
        return (grouped if inputs.is_cuda else one_by_one)(weights, inputs, masks)

    return step


def _dropout(share: float) -> _Step:
    def step(_weights: Sequence[Tensor], inputs: Tensor, masks: Masks) -> Tensor:
        return inputs * masks(share, inputs.shape) if share else inputs

    return step


def _plain(layer: nn.Module) -> _Step:
    def step(_weights: Sequence[Tensor], inputs: Tensor, _masks: Masks) -> Tensor:
        outputs = cast(Tensor, layer(inputs.flatten(0, 1)))
        return outputs.view(*inputs.shape[:2], *outputs.shape[1:])

    return step
