"""One client's and the server's work of a SecAgg+ round, done with Flower's own functions.

Run by `benchmarks/secagg.py` in an environment that holds flwr. Prints CPU milliseconds as one JSON
object. All clients are neighbours of each other, as in SecAgg; the threshold is two thirds.
Messages are not sent. Steps that Flower does not have (signatures, consent) are omitted.
"""

from __future__ import annotations

import argparse
import json
import os
import time

import numpy as np
from flwr.common.secure_aggregation.crypto.shamir import combine_shares, create_shares
from flwr.common.secure_aggregation.crypto.symmetric_encryption import (
    decrypt,
    encrypt,
    generate_shared_key,
)
from flwr.common.secure_aggregation.ndarrays_arithmetic import (
    factor_combine,
    get_parameters_shape,
    parameters_addition,
    parameters_mod,
    parameters_multiply,
    parameters_subtraction,
)
from flwr.common.secure_aggregation.quantization import quantize
from flwr.common.secure_aggregation.secaggplus_utils import (
    pseudo_rand_gen,
    share_keys_plaintext_concat,
    share_keys_plaintext_separate,
)
from flwr.supercore.primitives.asymmetric import (
    bytes_to_private_key,
    bytes_to_public_key,
    generate_key_pairs,
    private_key_to_bytes,
    public_key_to_bytes,
)

CLIP, TARGET, MODULUS = 8.0, 2**22, 2**32


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--clients", type=int, required=True)
    parser.add_argument("--length", type=int, required=True)
    parser.add_argument("--drop", type=int, required=True)
    options = parser.parse_args()
    threshold = max(2, options.clients * 2 // 3)
    keys = [[pair() for _ in range(options.clients)] for _ in range(2)]
    update = [np.random.default_rng(1).normal(0, 0.05, options.length).astype(np.float32)]
    mask, other = client(keys, update, threshold)
    unmask = server(keys[0], options.clients, options.length, options.drop, threshold)
    print(
        json.dumps(
            {
                "client_mask_ms": 1e3 * mask,
                "client_other_ms": 1e3 * other,
                "unmask_ms": 1e3 * unmask,
            }
        )
    )


def pair() -> tuple[bytes, bytes]:
    private, public = generate_key_pairs()
    return private_key_to_bytes(private), public_key_to_bytes(public)


def agree(private: bytes, public: bytes) -> bytes:
    return generate_shared_key(bytes_to_private_key(private), bytes_to_public_key(public))


def client(keys, update, threshold) -> tuple[float, float]:
    """Return client 0's CPU seconds: for masking, and for everything else."""
    clients = len(keys[0])
    begun = time.process_time()
    mask_key, channel_key = pair()[0], pair()[0]
    seed = os.urandom(32)
    shares = [create_shares(secret, threshold, clients) for secret in (seed, mask_key)]
    channels = {}
    sealed = {}
    for peer in range(1, clients):
        channels[peer] = agree(channel_key, keys[1][peer][1])
        plain = share_keys_plaintext_concat(0, peer, shares[0][peer], shares[1][peer])
        sealed[peer] = encrypt(channels[peer], plain)
    for peer in range(1, clients):  # stands for decrypting the peers' messages, which costs as much
        share_keys_plaintext_separate(decrypt(channels[peer], sealed[peer]))
    words = factor_combine(TARGET // 2, quantize(parameters_multiply(update, 0.5), CLIP, TARGET))
    secrets = [agree(mask_key, keys[0][peer][1]) for peer in range(1, clients)]
    other = time.process_time() - begun
    begun = time.process_time()
    shapes = [array.shape for array in words]
    words = parameters_addition(words, pseudo_rand_gen(seed, MODULUS, shapes))
    for secret in secrets:
        words = parameters_subtraction(words, pseudo_rand_gen(secret, MODULUS, shapes))
    parameters_mod(words, MODULUS)
    return time.process_time() - begun, other


def server(keys, clients, length, drop, threshold) -> float:
    """Return the server's CPU seconds for rebuilding secrets and removing masks."""
    alive = range(clients - drop)
    seeds = [os.urandom(32) for _ in range(clients)]
    shares = [
        create_shares(seeds[owner] if owner in alive else keys[owner][0], threshold, clients)[
            : len(alive)
        ]
        for owner in range(clients)
    ]
    total = [np.zeros(1, np.int64), np.zeros(length, np.int64)]
    begun = time.process_time()
    for owner in range(clients):
        secret = combine_shares(shares[owner])
        if owner in alive:
            mask = pseudo_rand_gen(secret, MODULUS, get_parameters_shape(total))
            total = parameters_subtraction(total, mask)
            continue
        for peer in alive:
            pair_seed = agree(secret, keys[peer][1])
            mask = pseudo_rand_gen(pair_seed, MODULUS, get_parameters_shape(total))
            total = parameters_addition(total, mask)
    parameters_mod(total, MODULUS)
    return time.process_time() - begun


if __name__ == "__main__":
    main()
