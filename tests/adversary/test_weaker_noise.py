"""Noise that hides less than a client's owner requires."""

from __future__ import annotations

from adversary.conftest import Scene

from potluck.secagg.protocol import Rule


async def test_noise_for_a_different_adjacency_than_that_of_the_owner_is_refused(
    scene: Scene,
) -> None:
    """Noise for added or removed samples is half of the noise that hides a replaced one."""
    outcome = await scene.federation.sum(epsilon=1.0, sensitivity=1)
    assert outcome.total is None
    assert set(outcome.record.refusals.values()) == {Rule.POLICY}
    assert not any(map(scene.federation.has_released, scene.federation.members.names))


async def test_sum_with_the_required_noise_is_released_and_recorded(scene: Scene) -> None:
    outcome = await scene.federation.sum(epsilon=1.0, sensitivity=2)
    assert outcome.total is not None
    for client in scene.federation.members.names:
        [upload] = scene.federation.ledger(client).of(client).uploads
        assert (upload.epsilon, upload.sensitivity, upload.adjacency) == (1.0, 2, "replace")
