"""
Models of others, in and out. No code that comes with a model is run.

In: every stage that reads a model takes as --init_from a Hugging Face folder, hf:ORG/NAME or
hf:ORG/NAME@REVISION, or a GGUF file. There are three ways to read it:

hf_folder.py  A Llama (TinyLlama, Llama 1 to 3, SmolLM2), SmolLM3 or Granite becomes one of ours,
              unless it computes something that our model does not.
foreign.py    transformers runs all other causal models, such as BLOOM or Qwen3: they can be
              evaluated and sampled from, but not tuned, trained or written.
gguf_file.py  The GGUF file of a Llama or Granite becomes one of ours, whatever its quantization.

The config.json of a NoPE model may say llama, as that of hf:AntNLP/TinyLlama-NoPE-1.1B does. It is
then read with RoPE, unless you give --position=none or the paper's code left head scales in it.

Out: a new folder for transformers and vLLM, or for llama.cpp. In a folder RoPE becomes a Llama, and
NoPE or a pattern of both a SmolLM3, whose config says which layers have RoPE; in a GGUF file NoPE
becomes a Granite. The softmax scales become part of the weights of q, so that they cost nothing.

$ python -m extras.convert --folder=out/demo/hf                       # as trained
$ python -m extras.convert --folder=out/demo/hf_640 --scale=out/demo/nope/scale_head_640.json
$ python -m extras.convert --folder=out/demo/gguf --format=gguf       # pip install ".[gguf]"

Writes the folder: the model and its tokenizer
"""

from pathlib import Path

from configurator import UserError, configure

import torch

from common import DTYPES, setup, weights_digest
from extras import gguf_file, hf_folder
from extras.foreign import Foreign
from model import ModelConfig
from position import split_scaling
from stage import open_model
from tokenizer import get_tokenizer, tokenizer_state

# which model
out_dir = 'out/demo/nope'    # folder of the run to read
init_from = 'last'           # last, best (of out_dir), a checkpoint file, a folder, hf:ORG/NAME
position: str | None = None  # position method; None: the checkpoint's
rope_scaling: str | None = None   # extension of RoPE, such as yarn:4; None: the checkpoint's
scale: float | str | None = None  # softmax scale: a number for all heads, or a scale file
# what to write
folder = ''                  # the new folder
format = 'hf'                # hf: for transformers and vLLM; gguf: for llama.cpp
target_length: int | None = None  # longest text in tokens. A file of several sets needs it: their
                             # set for this length is written. Otherwise None is what the scale file
                             # is tuned for, without a file block_size
dtype = 'bfloat16'           # of the written matrices: float32, bfloat16, float16


# ---------------------------------------------------------------------- in

def folder_of(source):
    """The folder of a source. From the hub only what we read is downloaded, once."""
    if not source.startswith('hf:'):
        return Path(source)
    from huggingface_hub import snapshot_download
    name, _, revision = source[3:].partition('@')
    for weights in 'model*.safetensors', 'pytorch_model*.bin':
        path = Path(snapshot_download(name, revision=revision or None,
                                      allow_patterns=['*.json', weights]))
        if any(path.glob(weights)):
            break
    return path


def read_folder(path, position, dtype):
    """The ModelConfig and the model of a folder: see read()."""
    try:
        return hf_folder.read(path, position)
    except hf_folder.Unlike as error:
        reason = str(error)  # not the error, because its traceback would keep all weights
    model = Foreign(path, dtype, reason)
    return model.config, model


def read(source, position=None, dtype=torch.float32):
    """
    A model of others, as read_checkpoint() returns one of ours. `model` is a state dict in our
    names, or a Foreign with weights of this dtype. position: the method that a folder's model was
    trained with; None: as its config.json says.
    """
    tokenizer = None
    try:
        if source.endswith('.gguf'):
            c, model, tokenizer = gguf_file.read(source)
        else:
            path = folder_of(source)
            c, model = read_folder(path, position, dtype)
            if (path / 'tokenizer.json').is_file():
                tokenizer = tokenizer_state(get_tokenizer(str(path / 'tokenizer.json')))
    except Exception as error:  # those of the libraries share no class
        raise UserError(f'{source} cannot be read: {error!r:.300} It must be a Hugging Face '
                        'folder, hf:ORG/NAME or the whole GGUF file of a Llama or Granite, and '
                        'this needs pip install ".[gguf]".') from error
    if not tokenizer:
        print(f'{source} has no tokenizer.json. Is the text encoded by its tokenizer? Nothing can '
              'check this.')
    if isinstance(model, dict):
        digest = weights_digest(model)
    else:  # the same whether the model was read in float32 or bfloat16
        digest = weights_digest(model.state_dict(), torch.bfloat16)
    return {'model': model, 'model_config': c, 'digest': digest, 'step': 0, 'settings': {},
            'tokenizer': tokenizer, 'path': source}


# ---------------------------------------------------------------------- out

def require_exportable(c):
    """Refuse a model that no stock model can hold, because the folder would compute otherwise."""
    names = *hf_folder.SETTINGS, 'position', 'pretrained_length', 'rope_scaling'
    # equal if everything else, such as short_conv, is at its default
    plain = ModelConfig(**{name: getattr(c, name) for name in names})
    if c != plain or not {*c.methods} <= {'none', 'rope'} or 'ntk' in c.rope_scaling:
        raise UserError('Only NoPE, RoPE and patterns of both can be written, without NTK, DAPE '
                        'or short convolutions.')


@torch.no_grad()
def fold(model):
    """Make head scales a part of the rows of q, and head gains of the columns of out."""
    C, D = model.config.n_embd, model.config.head_dim
    if 'rope' in model.config.position and model.head_scale.dim() == 3:
        raise UserError('With RoPE a scale per channel cannot be written, because it acts after '
                        "RoPE's rotation and the weights of q come before it.")
    for block in model.blocks:
        attention = block.attn
        scale, gain = attention.head_scale, attention.head_gain              # (H, 1) or (H, D)
        attention.qkv.weight[:C] *= scale.expand(-1, D).reshape(C, 1)
        attention.out.weight *= gain.expand(-1, D).flatten()
        scale.fill_(1)
        gain.fill_(1)


def main(given):
    path = Path(folder)
    if any(path.glob('*')) or format not in ('hf', 'gguf') or dtype not in DTYPES:
        raise UserError(f"Give a new --folder= (it is '{folder}'), --format=hf or gguf, and "
                        f"--dtype={', '.join(DTYPES)}.")
    runtime = setup('cpu', 'float32')
    model, info = open_model(init_from, out_dir, runtime, position, rope_scaling, scale)
    if isinstance(model, Foreign):
        model.refuse()
    c = model.config
    require_exportable(c)
    if model.scale_sets:
        if not target_length:
            raise UserError(f'{scale} has sets for {[*model.scale_sets]} tokens. Choose one of '
                            'these lengths, or one in between: --target_length=N.')
        model.take_set(target_length)
    fold(model)
    c.block_size = max(c.block_size, target_length or info['tuned_length'],
                       int(split_scaling(c.rope_scaling)[1] * c.pretrained_length))
    path.mkdir(parents=True, exist_ok=True)
    if format == 'hf':
        hf_folder.write(path, model, info['tokenizer'], dtype)
    else:
        path = path / 'model.gguf'
        gguf_file.write(path, model, info['tokenizer'], dtype)
    print(f"{info['path']} is now {path}, in {dtype}")


if __name__ == '__main__':
    main(configure(globals()))
