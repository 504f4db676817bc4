CREATE TABLE potluck_schema_version (
    version BIGINT NOT NULL,
    PRIMARY KEY (version)
);

CREATE TABLE runs (
    run_id TEXT NOT NULL,
    number BIGINT NOT NULL,
    name TEXT NOT NULL,
    run_file TEXT NOT NULL,
    created_at TEXT NOT NULL,
    rounds BIGINT NOT NULL,
    count BIGINT NOT NULL,
    seed TEXT NOT NULL,
    task TEXT NOT NULL,
    selector TEXT NOT NULL,
    strategy TEXT NOT NULL,
    measures TEXT NOT NULL,
    state TEXT NOT NULL,
    reason TEXT NOT NULL,
    changed_at TEXT NOT NULL,
    initial_model_blake3 TEXT,
    initial_model_at TEXT,
    PRIMARY KEY (run_id),
    UNIQUE (number)
);

CREATE INDEX runs_by_state ON runs (state);

CREATE INDEX runs_by_initial_model ON runs (initial_model_blake3);

CREATE TABLE clients (
    client_id TEXT NOT NULL,
    host_id TEXT NOT NULL,
    device TEXT NOT NULL,
    first_seen_at TEXT NOT NULL,
    last_seen_at TEXT NOT NULL,
    PRIMARY KEY (client_id)
);

CREATE TABLE quarantine (
    client_id TEXT NOT NULL,
    reason TEXT NOT NULL,
    at TEXT NOT NULL,
    PRIMARY KEY (client_id)
);

CREATE TABLE profiles (
    signal TEXT NOT NULL,
    client_id TEXT NOT NULL,
    data_epoch BIGINT NOT NULL,
    parameters_json TEXT NOT NULL,
    payload_json TEXT NOT NULL,
    signature TEXT,
    received_at TEXT NOT NULL,
    PRIMARY KEY (signal, client_id, data_epoch, parameters_json)
);

CREATE TABLE sum_certificates (
    number BIGINT NOT NULL,
    session_id TEXT NOT NULL,
    inputs TEXT NOT NULL,
    certificate TEXT NOT NULL,
    PRIMARY KEY (number),
    UNIQUE (session_id)
);

CREATE INDEX sum_certificates_by_inputs ON sum_certificates (inputs);

CREATE TABLE secure_sums (
    number BIGINT NOT NULL,
    session_id TEXT NOT NULL,
    run_id TEXT NOT NULL,
    kind TEXT NOT NULL,
    task TEXT NOT NULL,
    epochs TEXT NOT NULL,
    record TEXT NOT NULL,
    total TEXT,
    PRIMARY KEY (number),
    UNIQUE (session_id)
);

CREATE TABLE roster (
    run_id TEXT NOT NULL,
    row BIGINT NOT NULL,
    client_id TEXT NOT NULL,
    PRIMARY KEY (run_id, row),
    UNIQUE (run_id, client_id),
    FOREIGN KEY(run_id) REFERENCES runs (run_id)
);

CREATE TABLE attempts (
    run_id TEXT NOT NULL,
    round BIGINT NOT NULL,
    attempt BIGINT NOT NULL,
    begun_at TEXT NOT NULL,
    available TEXT NOT NULL,
    state TEXT NOT NULL,
    reason TEXT NOT NULL,
    spent BIGINT NOT NULL,
    PRIMARY KEY (run_id, round, attempt),
    FOREIGN KEY(run_id) REFERENCES runs (run_id)
);

CREATE TABLE left_out (
    run_id TEXT NOT NULL,
    client_id TEXT NOT NULL,
    process_id TEXT NOT NULL,
    trouble TEXT NOT NULL,
    at TEXT NOT NULL,
    PRIMARY KEY (run_id, client_id),
    FOREIGN KEY(run_id) REFERENCES runs (run_id)
);

CREATE TABLE participation (
    run_id TEXT NOT NULL,
    client_id TEXT NOT NULL,
    picks BIGINT NOT NULL,
    samples BIGINT,
    included_round BIGINT,
    included_attempt BIGINT,
    PRIMARY KEY (run_id, client_id),
    FOREIGN KEY(run_id) REFERENCES runs (run_id)
);

CREATE TABLE exchanges (
    run_id TEXT NOT NULL,
    round BIGINT NOT NULL,
    attempt BIGINT NOT NULL,
    step BIGINT NOT NULL,
    question TEXT NOT NULL,
    answers TEXT,
    PRIMARY KEY (run_id, round, attempt, step),
    FOREIGN KEY(run_id, round, attempt) REFERENCES attempts (run_id, round, attempt)
);

CREATE TABLE members (
    run_id TEXT NOT NULL,
    round BIGINT NOT NULL,
    attempt BIGINT NOT NULL,
    position BIGINT NOT NULL,
    client_id TEXT NOT NULL,
    host_id TEXT NOT NULL,
    state TEXT NOT NULL,
    reason TEXT NOT NULL,
    trouble TEXT,
    blake3 TEXT,
    size BIGINT,
    encoding TEXT,
    delta BIGINT,
    compressed BIGINT,
    samples BIGINT,
    steps BIGINT,
    seconds DOUBLE PRECISION,
    loss DOUBLE PRECISION,
    normalizer DOUBLE PRECISION,
    reports TEXT,
    measures TEXT,
    quotas TEXT,
    weight DOUBLE PRECISION,
    epochs BIGINT,
    dropped TEXT,
    PRIMARY KEY (run_id, round, attempt, position),
    UNIQUE (run_id, round, attempt, client_id),
    FOREIGN KEY(run_id, round, attempt) REFERENCES attempts (run_id, round, attempt)
);

CREATE INDEX members_by_client ON members (client_id, state);

CREATE TABLE rounds (
    run_id TEXT NOT NULL,
    round BIGINT NOT NULL,
    attempt BIGINT NOT NULL,
    model_blake3 TEXT NOT NULL,
    state_blake3 TEXT,
    selector_scalars TEXT NOT NULL,
    strategy_scalars TEXT NOT NULL,
    metrics TEXT NOT NULL,
    spreads TEXT NOT NULL,
    seconds DOUBLE PRECISION NOT NULL,
    bytes_down BIGINT NOT NULL,
    bytes_up BIGINT NOT NULL,
    committed_at TEXT NOT NULL,
    PRIMARY KEY (run_id, round),
    FOREIGN KEY(run_id, round, attempt) REFERENCES attempts (run_id, round, attempt)
);

CREATE INDEX rounds_by_state_file ON rounds (state_blake3);

CREATE INDEX rounds_by_model ON rounds (model_blake3);

CREATE TABLE late_updates (
    run_id TEXT NOT NULL,
    round BIGINT NOT NULL,
    client_id TEXT NOT NULL,
    attempt BIGINT NOT NULL,
    state TEXT NOT NULL,
    model_blake3 TEXT NOT NULL,
    seconds_left DOUBLE PRECISION NOT NULL,
    joined_round BIGINT,
    weight DOUBLE PRECISION,
    trouble TEXT,
    PRIMARY KEY (run_id, round, client_id),
    FOREIGN KEY(run_id, round, attempt) REFERENCES attempts (run_id, round, attempt)
);

CREATE INDEX late_updates_by_state ON late_updates (run_id, state);

CREATE INDEX late_updates_by_joined_round ON late_updates (run_id, joined_round);
