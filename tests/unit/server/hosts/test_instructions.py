"""Instructions to train, as the coordinator sends them to hosts."""

from potluck.rpc.v1 import transfer_pb2
from potluck.server.hosts.instructions import train_instruction
from potluck.server.plan.plan import draw_up
from potluck.server.store.records import MemberWork

RUN_FILE = """
[task]
name = "digits"
[training]
epochs = 8
[virtual_clock]
enabled = true
tail_per_sample = 0.0
seconds_per_sample = 3.0
deadline_seconds = 50.0
drop_outs = {gone = 1.0}
"""


def pace(client: str, *, speed: float, epochs: int | None) -> float:
    plan, model = draw_up(RUN_FILE, source="test"), transfer_pb2.ModelReference()
    work = MemberWork(epochs=epochs)
    return train_instruction(plan, "id", "r", 1, client, model, member=work, speed=speed).train.pace


def test_simulated_duration_follows_the_speed_and_the_passes_of_a_client() -> None:
    assert pace("here", speed=1.0, epochs=None) == 3.0
    assert pace("here", speed=100.0, epochs=None) == 0.03
    assert pace("here", speed=0.5, epochs=4) == 3.0


def test_client_that_drops_out_misses_the_deadline_at_any_speed_and_number_of_passes() -> None:
    for speed in (0.1, 1.0, 1000.0):
        for epochs in (None, 1, 100):
            assert pace("gone", speed=speed, epochs=epochs) > 50.0
