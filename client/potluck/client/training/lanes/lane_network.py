"""A network whose layers work on several sets of weights at once, a lane for each client.

It is made of the layers of a `torch.nn.Sequential`. A layer's weights are stacked, with lanes as an
additional first dimension. A fully connected layer is then one batched product. On a GPU, a
convolution is one grouped convolution; on a CPU, where that is slower, it runs lane by lane. All
other layers process the samples of all lanes as one batch.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor, nn

from potluck.client.training.lanes.lane_layers import (
    Convolution,
    GroupedConvolution,
    LaneByLane,
    LaneDropout,
    LaneFlatten,
    LaneLayer,
    LaneLinear,
    LaneMaxPool,
    LaneRelu,
    PlainLayer,
)
from potluck.client.training.task_training import UnfitForLanesError

_PLAIN = (
    nn.LeakyReLU,
    nn.ELU,
    nn.GELU,
    nn.SiLU,
    nn.Tanh,
    nn.Sigmoid,
    nn.Identity,
    nn.AvgPool2d,
    nn.AdaptiveAvgPool2d,
)
"""Layers without weights whose output for a sample depends on that sample only."""

_FRESH = (nn.Linear, nn.Conv2d, nn.ReLU, nn.MaxPool2d)
"""Layers whose outputs only the next layer needs, so that the next layer may overwrite them."""

_HOOKS = ("_forward_pre_hooks", "_forward_hooks", "_backward_pre_hooks", "_backward_hooks")
"""Attributes of a `torch.nn.Module` that hold the hooks set by `register_…_hook`."""

_Maker = Callable[[Sequence[Tensor], Sequence[Tensor]], LaneLayer]


@dataclass(frozen=True)
class _LanePlace:
    """A layer of a network; a lane is a client's slot in a batched step.

    make: function that creates the layer from its weights and the tensors for their gradients.
    begin, end: range of its tensors among all tensors. by_lane: like `make`, for a single lane;
    None if the layer can't be part of a sequence that is computed lane by lane.
    """

    make: _Maker
    begin: int
    end: int
    by_lane: _Maker | None

    @property
    def begins_stretch(self) -> bool:
        """True if a sequence that is computed lane by lane may begin here: at a convolution."""
        return self.by_lane is not None and self.end > self.begin

    def own(
        self, weights: Sequence[Tensor], gradients: Sequence[Tensor]
    ) -> tuple[Sequence[Tensor], Sequence[Tensor]]:
        """Return the layer's weights, and the tensors for their gradients."""
        return weights[self.begin : self.end], gradients[self.begin : self.end]


class LaneNetwork:
    """The layers of a network on stacked weights.

    names: names of the stacked tensors, in the order in which `layers_on` takes them.
    """

    def __init__(self, network: nn.Module) -> None:
        """Raises UnfitForLanesError for a network with a layer that is not supported here."""
        self.names: list[str] = []
        self._places: list[_LanePlace] = []
        self._fresh = False
        self.drops = False
        """True if the network has dropout, whose masks each lane draws for itself."""
        for name, layer in _in_fast_order(list(_layers(network, ""))):
            self._add(name, layer)
        parameters = {name for name, each in network.named_parameters() if each.requires_grad}
        if parameters != set(self.names) or set(network.state_dict()) != parameters:
            raise UnfitForLanesError(
                "batched steps don't support shared tensors, fixed tensors and buffers"
            )
        if any(each.dtype != torch.float32 for each in network.parameters()):
            raise UnfitForLanesError("batched steps need float32 for all tensors of the network")
        if any(_is_altered(each) for each in network.modules()):
            raise UnfitForLanesError("batched steps don't support layers with hooks")

    def layers_on(
        self, weights: Sequence[Tensor], gradients: Sequence[Tensor]
    ) -> Sequence[LaneLayer]:
        """Return layers that use these stacked weights, which are in the order of `names`.

        The weights may change in place. gradients: tensors like the weights, into which the layers
        write the gradients."""
        layers: list[LaneLayer] = []
        left = deque(self._places)
        while left:
            if left[0].begins_stretch and not weights[0].is_cuda:
                stretch: list[_LanePlace] = []
                while left and left[0].by_lane is not None:
                    stretch.append(left.popleft())
                layers.append(_lane_by_lane(stretch, weights, gradients))
            else:
                place = left.popleft()
                layers.append(place.make(*place.own(weights, gradients)))
        return layers

    def _add(self, name: str, layer: nn.Module) -> None:
        begin = len(self.names)
        make = self._maker(layer)
        by_lane: _Maker | None = None
        if isinstance(layer, nn.Conv2d):
            by_lane = partial(Convolution, layer)
        elif isinstance(layer, (nn.ReLU, nn.MaxPool2d)):
            by_lane = make
        if isinstance(layer, (nn.Linear, nn.Conv2d)):
            self.names.append(f"{name}weight")
            if layer.bias is not None:
                self.names.append(f"{name}bias")
        self._places.append(_LanePlace(make, begin, len(self.names), by_lane))
        if type(layer) is not nn.Flatten:  # Flatten returns a view of its inputs
            self._fresh = type(layer) in _FRESH

    def _maker(self, layer: nn.Module) -> _Maker:
        if type(layer) is nn.Linear:
            return LaneLinear
        if type(layer) is nn.Conv2d:
            _check_padding(layer)
            return partial(GroupedConvolution, layer)
        if type(layer) is nn.Flatten and (layer.start_dim, layer.end_dim) == (1, -1):
            return lambda _weights, _gradients: LaneFlatten()
        if type(layer) is nn.Dropout:
            share = layer.p
            if not share:
                return lambda _weights, _gradients: PlainLayer(nn.Identity())
            self.drops = True
            return lambda _weights, _gradients: LaneDropout(share)
        if type(layer) is nn.ReLU:
            in_place = self._fresh
            return lambda _weights, _gradients: LaneRelu(in_place=in_place)
        if type(layer) is nn.MaxPool2d and not layer.return_indices:
            return lambda _weights, _gradients: LaneMaxPool(layer)
        if type(layer) in _PLAIN:
            return lambda _weights, _gradients: PlainLayer(layer)
        raise UnfitForLanesError(f"batched steps don't support the layer {type(layer).__name__}")


def stacked(state: Mapping[str, Tensor], names: Sequence[str], lanes: int) -> list[Tensor]:
    """Return the named weights, repeated for every lane: lanes × …, in the order of `names`."""
    return [state[name].detach().unsqueeze(0).expand(lanes, *state[name].shape) for name in names]


def _layers(network: nn.Module, prefix: str) -> Iterator[tuple[str, nn.Module]]:
    if type(network) is not nn.Sequential:
        raise UnfitForLanesError(
            f"batched steps need an nn.Sequential, but the network is a {type(network).__name__}"
        )
    for name, layer in network.named_modules(remove_duplicate=False):  # a layer may occur twice
        if not name or "." in name:
            continue
        if type(layer) is nn.Sequential:
            yield from _layers(layer, f"{prefix}{name}.")
        else:
            yield f"{prefix}{name}.", layer


def _is_altered(layer: nn.Module) -> bool:
    """Return True if hooks, or a `forward` set on the object, change the layer's behaviour."""
    own = vars(layer)
    return "forward" in own or any(own.get(kind) for kind in _HOOKS)


def _in_fast_order(layers: list[tuple[str, nn.Module]]) -> list[tuple[str, nn.Module]]:
    """Move each max pooling before the ReLU that precedes it: the result is equal, and ReLU gets
    smaller inputs.
    """
    for place in range(len(layers) - 1):
        first, second = layers[place][1], layers[place + 1][1]
        if type(first) is nn.ReLU and type(second) is nn.MaxPool2d:
            layers[place], layers[place + 1] = layers[place + 1], layers[place]
    return layers


def _lane_by_lane(
    stretch: Sequence[_LanePlace], weights: Sequence[Tensor], gradients: Sequence[Tensor]
) -> LaneLayer:
    """Return one layer that runs the layers of `stretch` on one lane after the other."""

    def of_lane(lane: int) -> Sequence[LaneLayer]:
        layers: list[LaneLayer] = []
        for place in stretch:
            mine, theirs = place.own(weights, gradients)
            if place.by_lane is not None:
                layers.append(place.by_lane([w[lane] for w in mine], [g[lane] for g in theirs]))
        return layers

    return LaneByLane([of_lane(lane) for lane in range(len(weights[0]))])


def _check_padding(layer: nn.Conv2d) -> None:
    if layer.padding_mode != "zeros" or isinstance(layer.padding, str):
        raise UnfitForLanesError(
            "batched steps support only convolutions with a numeric padding of zeros"
        )
