"""
Export a checkpoint, its scales folded into the weights, as a Hugging Face folder that stock
transformers loads.

$ python export.py --folder=out/demo/hf                                       # as trained
$ python export.py --scale=out/demo/nope/scale_head_640.json --folder=out/demo/hf_640   # for 4L

NoPE becomes SmolLM3 without RoPE in any layer, RoPE becomes Llama. Writes config.json,
model.safetensors, tokenizer.json and tokenizer_config.json.
"""

from configurator import configure, settings
from lib.checkpoints import Run
from lib.devices import DTYPES
from lib.errors import UserError
from lib.huggingface import save_folder
from lib.scales import read_scale_file

out_dir = 'out/demo/nope'  # the run to read
init_from = 'last'         # last or best (of out_dir), a checkpoint file, or hf:ORG/NAME
scale: float | str | None = None  # softmax scale: a number for all heads, or a scale file
position: str | None = None       # read it with another position method than it says, such as none
rope_scaling: str | None = None   # extension of RoPE, such as yarn:4
target_length: int | None = None  # which of a scale file's several sets to fold, in tokens
folder: str | None = None  # a new folder; None: out_dir/hf
dtype = 'bfloat16'         # of the matrices written: bfloat16, float32, float16


def choose_set(model, L):
    """Put the set for target_length tokens into the model, for good. Returns that length."""
    sets = model.scale_sets
    if sets is None:
        if target_length is not None:
            raise UserError('target_length chooses a set of a scale file; '
                            f'--scale={scale} has none. Leave it out.')
        return None
    lengths = ', '.join(map(str, sets.sets))
    if target_length is None or not L <= target_length <= max(sets.sets):
        raise UserError(f'target_length is {target_length}, and {scale} has sets for {lengths} '
                        'tokens, of which a folder can hold one. Choose one, or a length in '
                        'between.')
    sets.use(target_length)
    sets.remove()
    return target_length


def main():
    if dtype not in DTYPES:
        raise UserError(f"dtype is '{dtype}'. Choose {', '.join(DTYPES)}.")
    run = Run(settings(globals()) | {'device': 'cpu', 'dtype': 'float32'})
    length = choose_set(run.model, run.L)
    if length is None and isinstance(scale, str):
        length, = read_scale_file(scale, run.info)[1]  # of its one set
    target = folder or f'{out_dir}/hf'
    save_folder(target, run.model, run.info['tokenizer'], DTYPES[dtype], length or 0)
    print(f"{run.info['path']} ({run.model.n_params():,} parameters, "
          f'position={run.model.config.position}) is now {target}, in {dtype}. To load it:\n'
          f'  model = transformers.AutoModelForCausalLM.from_pretrained({target!r})\n'
          f'  tokenizer = transformers.AutoTokenizer.from_pretrained({target!r})')


if __name__ == '__main__':
    configure(globals())
    main()
