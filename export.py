"""
Export a checkpoint, its scales folded into the weights, as a Hugging Face folder that stock transformers loads.

$ python export.py --folder=out/demo/hf                                                    # the demo model as trained
$ python export.py --scale=out/demo/nope/scale_head_640.json --folder=out/demo/hf_640      # and as tuned for 4L

NoPE becomes SmolLM3 without RoPE in any layer, RoPE becomes Llama. Writes config.json, model.safetensors,
tokenizer.json and tokenizer_config.json.
"""

import checkpoint
import huggingface
from configurator import configure
from runtime import DTYPES

out_dir = 'out/demo/nope'  # the run to read
init_from = 'last'         # last or best (of out_dir), a checkpoint file, a Hugging Face folder or hf:ORG/NAME
scale: float | str | None = None  # softmax scale: a number for all heads, or a scale file
position: str | None = None       # read it with another position method than it says, such as none
rope_scaling: str | None = None   # extension of RoPE, such as yarn:4
target_length: int | None = None  # of a scale file with several sets: the length whose set to fold, in tokens
folder: str | None = None  # a new folder; None: out_dir/hf
dtype = 'bfloat16'         # of the matrices written: bfloat16, float32, float16


def main():
    if dtype not in DTYPES:
        raise ValueError(f"dtype is '{dtype}'. Choose {', '.join(DTYPES)}.")
    model, info = checkpoint.load_model(init_from, out_dir, 'cpu', position=position, rope_scaling=rope_scaling)
    checkpoint.apply_scale(model, scale, info)
    length = target_length
    if model.sets:
        if target_length is None:
            raise ValueError(f'{scale} has sets for {", ".join(map(str, sorted(model.sets)))} tokens, and a folder can '
                             'hold one. Choose with --target_length=.')
        if not model.config.block_size <= target_length <= max(model.sets):
            raise ValueError(f'target_length is {target_length}; the sets of {scale} are for '
                             f'{model.config.block_size} to {max(model.sets)} tokens. Choose a length in between.')
        model.use_set(target_length)
    elif target_length is not None:
        raise ValueError(f'target_length chooses a set of a scale file; --scale={scale} has none. Leave it out.')
    elif isinstance(scale, str):
        length, = checkpoint.read_scale_file(scale, info)[1]  # of its one set
    target = folder or f'{out_dir}/hf'
    huggingface.save_folder(target, model, info['tokenizer'], DTYPES[dtype], length or 0)
    print(f"{info['path']} ({model.n_params():,} parameters, position={model.config.position}) is now {target}, in "
          f'{dtype}. To load it:\n'
          f'  model = transformers.AutoModelForCausalLM.from_pretrained({target!r})\n'
          f'  tokenizer = transformers.AutoTokenizer.from_pretrained({target!r})')


if __name__ == '__main__':
    configure(globals())
    main()
