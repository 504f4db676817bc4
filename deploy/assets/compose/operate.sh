#!/bin/sh
# Without arguments: start the first run, if there is none yet. With arguments: that command.
set -eu
if [ "$#" -gt 0 ]; then
    exec potluck "$@"
fi
if potluck runs --json | python -c 'import json, sys; sys.exit(not json.load(sys.stdin)["runs"])'; then
    echo "there is a run already; 'docker compose run --rm operator run -' starts another"
else
    potluck run /etc/potluck/run.toml
fi
