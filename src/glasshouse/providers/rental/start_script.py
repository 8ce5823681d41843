"""The start command of a rented machine, and what it prints: its own host key, and what ends it.

Laws: nothing in it is secret, and no variable of the machine is needed but those that its provider sets; what ends
the machine runs before anyone can log in, and begins anew with the machine without a later end; a host key is made
there, believed only beside the nonce of its own start, and found again by that nonce when the machine starts anew.
"""

from __future__ import annotations

import re
import shlex

from glasshouse.providers.rental.provider import Start
from glasshouse.providers.serve.keepers import RENTED, STORED

READY, NO_SSHD = "glasshouse-host-key", "glasshouse-no-sshd"
_KEY = re.compile(r"ssh-ed25519 [A-Za-z0-9+/]{68}")
_SCRIPT = """\
umask 077
end() {{ {end}; }}
(
  trap '' HUP
  left={ends_s}
  now=$(date +%s) || now=
  case $now in
    '' | *[!0-9]*) ;;
    *) [ $(({ends_at_s} - now)) -ge "$left" ] || left=$(({ends_at_s} - now)) ;;
  esac
  while [ "$left" -gt 0 ]; do
    step=60
    [ "$left" -ge "$step" ] || step=$left
    sleep "$step"
    left=$((left - step)) stored=
    {{ read -r stored <"$HOME/{stored}"; }} 2>/dev/null
    [ "$stored" != {nonce} ] || left=0
  done
  while :; do end; sleep 60; done
) </dev/null >/dev/null 2>&1 &
sshd=$(command -v sshd || echo /usr/sbin/sshd)
if [ ! -x "$sshd" ]; then echo {no_sshd} {nonce}; sleep 120; while :; do end; sleep 60; done; fi
mkdir -p /run/sshd "$HOME/.ssh" /etc/ssh
echo {nonce} >"$HOME/{rented}"
echo {public} >>"$HOME/.ssh/authorized_keys"
key=/etc/ssh/glasshouse_host_key_{nonce}
ssh-keygen -y -P '' -f "$key" >"$key.pub" 2>/dev/null || {{
  rm -f "$key" "$key.pub"
  ssh-keygen -q -t ed25519 -N '' -C '' -f "$key"
}}
echo {ready} {nonce} "$(cut -d ' ' -f 1,2 "$key.pub")"
exec "$sshd" -D -e -h "$key" -p {port} -o PasswordAuthentication=no -o KbdInteractiveAuthentication=no \\
  -o PermitRootLogin=prohibit-password -o PidFile=none
"""


def start_script(start: Start, *, end: str, port: int = 22) -> str:
    """Return what the machine runs as its first process, for ``sh -c``.

    Args:
        end: a command that ends the machine at its provider, from inside; tried again each minute. It is tried early
            where `providers.serve.storing` has left `STORED`: what the run left is at its gate.
    """
    return _SCRIPT.format(
        end=end,
        ends_s=start.ends_s,
        ends_at_s=start.ends_at_s,
        public=shlex.quote(start.ssh_public),
        ready=READY,
        no_sshd=NO_SSHD,
        nonce=start.nonce,
        port=port,
        rented=RENTED,
        stored=STORED,
    )


def host_key(output: str, nonce: str) -> str | None:
    """Return the host key that a machine printed, as ``known_hosts`` has it; None where it did not, or not yet.

    Raises:
        ValueError: the machine's image has no sshd.
    """
    for line in output.splitlines():
        word, _, rest = line[line.find("glasshouse-") :].partition(f" {nonce}")
        if word == NO_SSHD:
            raise ValueError(NO_SSHD)
        if word == READY and _KEY.fullmatch(rest.strip()):
            return rest.strip()
    return None


def started_anew(output: str, nonce: str, key: str) -> bool:
    """Return whether another host key was printed since this one: it was started anew, and what ran there ended."""
    lines = [line for line in output.splitlines() if f"{READY} {nonce} " in line]
    return any(line.rstrip().endswith(key) for line in lines) and not lines[-1].rstrip().endswith(key)
