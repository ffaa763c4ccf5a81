# What game, jail and rewards need on another Python or processor: read by .ci/run and tests/aarch64.sh.
# shellcheck shell=bash disable=SC2034  # it is used there
elsewhere=(tests/referee tests/script/test_{engine,games,hostile,rewards}.py)

needed_elsewhere() { grep -oE '^ *"(pytest|pytest-xdist|tyro|rich|jinja2)==[^"]+' pyproject.toml | tr -d ' "'; }
