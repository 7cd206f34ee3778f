# The run.sh of the studies read this. train FOLDER ARGUMENTS...: train a model into a folder, go on
# with a training that was stopped, and skip one that has ended (train.py draws loss.png last).
train() {
    folder=$1; shift
    test -f $folder/loss.png && return
    test -f $folder/last.pt && set -- "$@" --init_from=resume
    python train.py "$@" --out_dir=$folder
}
