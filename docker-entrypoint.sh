#!/usr/bin/env bash
# Runs the command as the owner of the working directory, so that its files belong to whoever mounted the directory.
#
# Caches go to .cache in that directory, so they outlast the container. Compiled Python goes there too, because .venv
# belongs to root and every start would compile it again. USER and LOGNAME are set because torch asks for a user name,
# and the owner may have none in the container. In a rootless engine the owner is root.
set -euo pipefail

export HOME=$PWD/.cache XDG_CACHE_HOME=$PWD/.cache PYTHONPYCACHEPREFIX=$PWD/.cache/bytecode USER=trainer LOGNAME=trainer
owner=$(stat -c %u .) group=$(stat -c %g .)
if [[ $(id -u) == 0 && $owner != 0 ]]; then
    as_owner=(setpriv --reuid="$owner" --regid="$group" --clear-groups --no-new-privs --)
    "${as_owner[@]}" true 2>/dev/null || {
        echo 'error: this container may not change its user: start it with --user $(id -u):$(id -g)' >&2
        exit 2
    }
    exec "${as_owner[@]}" "$@"
fi
exec "$@"
