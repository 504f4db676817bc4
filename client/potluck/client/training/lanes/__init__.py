"""Several clients of a host trained in one batched step, each in a lane of its own."""
