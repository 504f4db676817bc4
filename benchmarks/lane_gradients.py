"""Gradients of batched steps in closed form, side by side with autograd on stacked weights.

A step here is forward and backward of all lanes, with cross-entropy. Three ways are timed in turns,
in one process, and their gradients compared: the layers of `potluck.client.training.lanes`;
autograd on the same batched products, with convolutions lane by lane; and `torch.func.vmap` of
`grad`. The fastest of several repetitions counts, in processor time.

    python benchmarks/lane_gradients.py [--lanes 10] [--batch 16] [--repeats 9]
"""

from __future__ import annotations

import argparse
from collections.abc import Callable, Sequence
from functools import partial

import torch
from repetitions import fastest
from torch import Tensor, nn
from torch.nn import functional

from potluck.client.training.lanes.lane_network import LaneNetwork
from potluck.common.models.lenet import lenet5
from potluck.common.models.perceptron import perceptron

STEPS = 20
"""Steps per repetition."""

Gradients = Callable[[], Sequence[Tensor]]


def no_masks(share: float, shape: torch.Size) -> Tensor:
    """Stand-in for the masks of dropout, which no network here has."""
    raise AssertionError(f"a layer draws masks of {share} for {tuple(shape)}")


def in_closed_form(
    network: nn.Sequential, weights: Sequence[Tensor], inputs: Tensor, labels: Tensor
) -> Gradients:
    """Return a step by the layers that write their gradients themselves."""
    gradients = [torch.empty_like(each) for each in weights]
    layers = LaneNetwork(network).layers_on(weights, gradients)

    def step() -> Sequence[Tensor]:
        with torch.no_grad():
            outputs = inputs
            for layer in layers:
                outputs = layer.forward(outputs, no_masks)
            gradient = torch.softmax(outputs, 2)
            gradient.scatter_add_(2, labels[..., None], -torch.ones_like(labels[..., None]).float())
            gradient /= inputs.shape[1]
            for place in range(len(layers) - 1, -1, -1):
                gradient = layers[place].backward(gradient, first=place == 0)
        return gradients

    return step


def by_stacked_autograd(
    network: nn.Sequential, weights: Sequence[Tensor], inputs: Tensor, labels: Tensor
) -> Gradients:
    """Return a step by autograd on stacked weights."""
    leaves = [each.clone().requires_grad_() for each in weights]

    def forward() -> Tensor:
        left, outputs = iter(leaves), inputs
        for layer in network:
            if isinstance(layer, nn.Linear):
                weight, bias = next(left), next(left)
                outputs = torch.baddbmm(bias.unsqueeze(1), outputs, weight.transpose(1, 2))
            elif isinstance(layer, nn.Conv2d):
                kernels = zip(outputs, next(left), next(left), strict=True)
                outputs = torch.stack(
                    [functional.conv2d(*each, padding=layer.padding) for each in kernels]
                )
            elif isinstance(layer, nn.Flatten):
                outputs = outputs.flatten(2)
            else:
                outputs = layer(outputs.flatten(0, 1)).unflatten(0, outputs.shape[:2])
        return outputs

    def step() -> Sequence[Tensor]:
        batch = labels.shape[1]
        loss = (
            functional.cross_entropy(forward().flatten(0, 1), labels.flatten(), reduction="sum")
            / batch
        )
        return torch.autograd.grad(loss, leaves)

    return step


def by_vmap(
    network: nn.Sequential, weights: Sequence[Tensor], inputs: Tensor, labels: Tensor
) -> Gradients:
    """Return a step by `torch.func.vmap` of `grad`."""
    names = [name for name, _ in network.named_parameters()]

    def loss(state: dict[str, Tensor], batch: Tensor, wanted: Tensor) -> Tensor:
        return functional.cross_entropy(
            torch.func.functional_call(network, state, (batch,)), wanted
        )

    stacked = dict(zip(names, weights, strict=True))
    found = torch.func.vmap(torch.func.grad(loss))
    return lambda: list(found(stacked, inputs, labels).values())


def seconds_of(
    network: nn.Sequential, shape: Sequence[int], lanes: int, batch: int, repeats: int
) -> list[float]:
    """Return processor seconds per step of each way. Raises AssertionError if gradients differ."""
    generator = torch.Generator().manual_seed(1)
    weights = [
        torch.randn(lanes, *each.shape, generator=generator) * each.std()
        for each in network.parameters()
    ]
    inputs = torch.randn(lanes, batch, *shape, generator=generator)
    labels = torch.randint(0, 10, (lanes, batch), generator=generator)
    ways = [
        way(network, weights, inputs, labels)
        for way in (in_closed_form, by_stacked_autograd, by_vmap)
    ]
    expected = [each.clone() for each in ways[0]()]
    for way in ways[1:]:
        for one, other in zip(expected, way(), strict=True):
            torch.testing.assert_close(one, other, rtol=1e-3, atol=1e-5)
    best = [float("inf")] * len(ways)
    for _ in range(repeats):  # in turns
        for place, way in enumerate(ways):
            best[place] = min(best[place], fastest(partial(_steps, way), 1) / STEPS)
    return best


def _steps(way: Gradients) -> None:
    for _ in range(STEPS):
        way()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--lanes", type=int, default=10, help="clients in a step")
    parser.add_argument("--batch", type=int, default=16, help="samples per client")
    parser.add_argument("--repeats", type=int, default=9, help="repetitions of each way")
    options = parser.parse_args()
    torch.set_num_threads(1)
    networks: dict[str, tuple[nn.Sequential, Sequence[int]]] = {
        "perceptron 64-32-10": (perceptron(64, (32,), 10, dropout=0.0), (64,)),
        "perceptron 784-200-10": (perceptron(784, (200,), 10, dropout=0.0), (784,)),
        "LeNet-5": (lenet5(), (3, 32, 32)),
    }
    print("network                 closed form   autograd   ratio       vmap   ratio")
    for name, (network, shape) in networks.items():
        own, autograd, vmap = seconds_of(
            network, shape, options.lanes, options.batch, options.repeats
        )
        print(
            f"{name:22} {own * 1e6:9.0f} µs {autograd * 1e6:7.0f} µs {autograd / own:7.2f} "
            f"{vmap * 1e6:7.0f} µs {vmap / own:7.2f}"
        )


if __name__ == "__main__":
    main()
