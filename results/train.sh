# The run.sh of the studies read this. train FOLDER ARGUMENTS...: train a model into a folder, go on
# with a training that was stopped, and keep one that has ended with the same settings.
train() {
    python -m results.study "$@"
}
