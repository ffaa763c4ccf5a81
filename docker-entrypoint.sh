#!/usr/bin/env bash
# Runs the command as the owner of the working directory, so that what it writes belongs to whoever mounted it.
#
# Caches go into its folder .cache, where they outlast the container; compiled Python too, which else would be made anew at
# every start, for .venv is root's. The user may have no name in here, which torch asks for. In a rootless engine, root is
# that owner.
set -euo pipefail

export HOME=$PWD/.cache XDG_CACHE_HOME=$PWD/.cache PYTHONPYCACHEPREFIX=$PWD/.cache/bytecode USER=trainer LOGNAME=trainer
owner=$(stat -c %u .) group=$(stat -c %g .)
if [[ $(id -u) == 0 && $owner != 0 ]]; then
    exec setpriv --reuid="$owner" --regid="$group" --clear-groups --no-new-privs -- "$@"
fi
exec "$@"
