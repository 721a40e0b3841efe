#!/bin/sh
# run_pipetransformer.sh                  sets up .venv and runs the demo: an elastic run on 2 ranks, on handwritten digits
# run_pipetransformer.sh NPROC NNODES NODE_RANK MASTER_ADDR MASTER_PORT CONFIG RUN_ID [--max-restarts=N] [key=value ...]
set -eu
here=$(CDPATH='' cd -- "$(dirname -- "$0")" && pwd)

if [ $# -eq 0 ]; then
    cd "$here"
    sh setup.sh
    free_port='import socket; s = socket.create_server(("127.0.0.1", 0)); print(s.getsockname()[1])'
    port=$(.venv/bin/python -c "$free_port")
    set -- 2 1 0 127.0.0.1 "$port" config/train_config_digits_all_in_one.yaml demo run.overwrite=true pipe.initial_length=2
elif [ $# -lt 7 ]; then
    echo "usage: sh $0 NPROC NNODES NODE_RANK MASTER_ADDR MASTER_PORT CONFIG RUN_ID [key=value ...]" >&2
    exit 2
fi

python=$here/.venv/bin/python
[ -x "$python" ] || python=$(command -v python3) || {
    echo "error: python3 is missing; install Python 3.10 or newer" >&2
    exit 1
}
PYTHONPATH=$here${PYTHONPATH:+:$PYTHONPATH}
export PYTHONPATH
"$python" -c 'import sys, importlib.util as u; sys.exit(not all(map(u.find_spec, ("torch", "pydantic"))))' || {
    echo "error: torch or pydantic is missing for $python; run 'sh $here/setup.sh' once" >&2
    exit 1
}
exec "$python" -m pipetransformer.launch "$@"
