#!/bin/sh
# The certificates of the federation in docker-compose.yml, each party's in a volume of its own:
# nobody sees another's key, and only this one-shot ever sees the authority's. Does what is missing.
set -eu
umask 077
cd /pki

# hand_over PARTY: the certificate that was just issued, to the party's own volume, by its role.
hand_over() {
    cp authority/authority.pem "$1/authority.pem"
    mv "authority/$1.pem" "$1/certificate.pem"
    mv "authority/$1.key" "$1/key.pem"
}

[ -e authority/authority.key ] || potluck pki init authority --federation compose

if [ ! -e coordinator/key.pem ]; then
    potluck pki issue authority coordinator --force --host coordinator --host localhost --host 127.0.0.1
    hand_over coordinator
fi
if [ ! -e operator/key.pem ]; then
    potluck pki issue authority operator operator --force
    hand_over operator
fi
first=0
for host in host-0 host-1 host-2; do
    if [ ! -e "$host/key.pem" ]; then
        potluck pki issue authority host "$host" --force --clients "client-$first:$((first + 7))"
        hand_over "$host"
    fi
    first=$((first + 8))
done

# Grafana runs as another user, and reads nothing but this.
if [ ! -e grafana/admin-password ]; then
    python -c 'import secrets; print(secrets.token_urlsafe(24), end="")' >grafana/.new
    chmod 0444 grafana/.new
    mv grafana/.new grafana/admin-password
    chmod 0755 grafana
fi
