# What the run.sh of the studies share. They run in the project's root, and keep what is there.
set -e

once() {  # FILE COMMAND...: run the command that writes a file, unless it is there
    test -f "$1" || "${@:2}"
}

train() {  # FOLDER ARGUMENTS...: train a model, or go on with a training that was stopped
    # a resumed run has its settings in last.pt, so the other arguments go
    test ! -f "$1/last.pt" || set -- "$1" --init_from=resume
    once "$1/loss.png" ${LAUNCH:-python} train.py "${@:2}" --out_dir="$1"
}
