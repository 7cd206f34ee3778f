"""
Mistakes that are refused in one line before any work, as data: the stage, its arguments, and what
the line must name. Capital words stand for the arguments below. {run} is the folder of a trained
run, in it nan.pt, the model with a weight that is not a number, sets.json, scales for 64 and 128
tokens, and passkey.jsonl, the answers of another run; {corpus} its data set, {other} one of
another tokenizer, {tmp} an empty folder. {flipped_run} and {flipped_corpus} are the same with a bit
turned over. {given} is a folder of files with the content at the end of the line, where DEEP stands
for many open brackets.

$ python -m pytest tests/test_refusals.py
"""

import json
import math
import re
import shutil

import pytest
import torch
from conftest import SIZES, contents, flip_a_bit, mistake, scale_set

from lib import checkpoints
from lib.scales import save_scale

ON_CPU = '--device=cpu --dtype=float32 '
SHORT = {
    'NAN': '--init_from={run}/nan.pt --out_dir={tmp} ' + ON_CPU,
    'READ': '--out_dir={run} ' + ON_CPU,
    'WRITE': '--init_from={run}/last.pt --out_dir={tmp}/out ' + ON_CPU,
    'TRAIN': '--out_dir={tmp}/new --compile=False --device=cpu --dataset={corpus} ' + SIZES,
    'FINETUNE': '--out_dir={tmp}/new --device=cpu --dataset={corpus} --init_from={run}/last.pt',
    'RESUME': '--out_dir={run} --init_from=resume --device=cpu --dataset={corpus} ' + SIZES,
    'EXPORT': '--out_dir={run} --folder={tmp}/hf',
    'TEXT': '{corpus}/meta.json --out_dir={tmp}/out --val_fraction=0 --test_fraction=0',
    'LOCAL': '--tokenizer=bytes --out_dir={tmp}/out',
    'PREPARE': '--out_dir={tmp}/out --val_fraction=0 --test_fraction=0',
    'GIVEN': '--init_from={run}/last.pt --out_dir={tmp} --device=cpu --compare=["{given}/x.json"]',
    'CHE': '--out_dir={tmp}/out --tasks=["even_pairs"] --train_length=6 --test_length=9',
}

GIVEN = 'config.json x.json x.jsonl x.tiktoken x.txt x.txt.gz train.jsonl train.parquet'

MISTAKES = r'''
eval_ppl        NAN --protocol=sliding --max_windows=4 | nan
eval_ppl        NAN --protocol=tail --n_samples=2 | nan
eval_ppl        NAN --protocol=position --n_samples=2 | nan
entropy         NAN --n_samples=2 --length=64 | nan
tune_scale      NAN --method=uniform --n_samples=2 --dataset={corpus} | nan
sample          NAN --max_new_tokens=2 | logits of the model are not finite

files that are damaged, of another kind, of another tokenizer, or not there
sample          --out_dir={flipped_run} --device=cpu | flipped_run/last.pt
sample          --out_dir={tmp} | last.pt does not exist
eval_ppl        READ --dataset={flipped_corpus} | test.bin
eval_ppl        WRITE --dataset={other} | th.tiktoken
train           TRAIN --dataset={flipped_corpus} | val.bin
train           TRAIN --dataset={corpus},{flipped_train} | train.bin
train           TRAIN --init_from={flipped_run}/last.pt | last.pt
train           TRAIN --init_from=resume | last.pt
train           TRAIN --min_lr=0.1 | min_lr 0.1 is above learning_rate 0.002
train           RESUME --seed=5 | seed is 5, but
train           RESUME --dataset={corpus}:2 | dataset is
train           FINETUNE --block_size=32 --rope_base=5000 | rope_base is 5000.0
train           TRAIN --dataset=nowhere | nowhere
train           TRAIN --dataset={corpus},{other} | th.tiktoken
train           TRAIN --init_from={run}/last.pt --dataset={other} | th.tiktoken
train           RESUME --dataset={other} | th.tiktoken
sample          --init_from={run} --device=cpu | --init_from={run}/last.pt
sample          --init_from={given} --device=cpu | has no config.json
sample          --init_from={given} --device=cpu | config.json | {
sample          --init_from={given} --device=cpu | config.json | DEEP
sample          --init_from={given} --device=cpu | config.json | {"model_type": ["llama"]}
sample          --init_from={given} --device=cpu | config.json | null
passkey         READ --max_length=600 --n_lengths=2 | {run}/passkey.jsonl
entropy         WRITE --compare=["{run}/passkey.json"] | passkey.json
entropy         WRITE --compare=["{run}/gap.json"] | gap.json has null in loss
tune_scale      WRITE --method=head | scale_uniform.json
eval_ppl        WRITE --scale=nowhere.json | nowhere.json
eval_ppl        WRITE --scale=1,2 | scale
eval_ppl        WRITE --scale={run}/passkey.json | is not a scale file
eval_ppl        WRITE --protocol=repeat --lengths=[64,128] | windows of one length
eval_ppl        WRITE --scale={run}/uneven.json | uneven.json
entropy         GIVEN | x.json | {
entropy         GIVEN | x.json | []
entropy         GIVEN | x.json | DEEP
entropy         GIVEN | x.json | {"stage": "che", "position": [1], "loss": [1]}
entropy         GIVEN | x.json | {"stage": "entropy"}
entropy         GIVEN | x.json | {"stage": "entropy", "position": 5, "loss": [1]}
entropy        GIVEN | x.json | {"stage": "entropy", "position": [], "mean_entropy": [], "loss": []}
entropy   GIVEN | x.json | {"stage": "entropy", "position": [1], "mean_entropy": [1], "loss": ["1"]}

lib/plots       {given}/x.json | x.json has no picture | {"stage": "bench"}
lib/plots       {given}/x.json | x.json has no picture | [1]
lib/plots       {given}/x.json | x.json has no 'rows' | {"stage": "eval_ppl", "protocol": "sliding"}

data that cannot be read, tokenizers and mixtures that cannot work
data/text/prepare  PREPARE | Name files
data/text/prepare  PREPARE nowhere.txt | nowhere.txt
data/text/prepare  TEXT --val=["{given}/x.txt"] --test=["{given}/x.txt"] | x.txt | text
data/text/prepare  PREPARE {given}/x.txt | x.txt is not UTF-8: byte 5 | fine\n\xe4
data/text/prepare  PREPARE {given}/x.jsonl | x.jsonl, line 2, | {"text": "fine"}\nDEEP
data/text/prepare  PREPARE {given}/x.jsonl | x.jsonl, line 2, | {"text": "fine"}\n{"text":
data/text/prepare  PREPARE {given}/x.jsonl | x.jsonl, line 2, | {"text": "fine"}\n[1]
data/text/prepare  PREPARE {given}/x.jsonl | {"body": "x" | {"text": "fine"}\n{"body": "x", "id": 1}
data/text/prepare  PREPARE {given}/x.txt.gz | x.txt.gz | \x1f\x8b\x08\0\0\0\0\0\0\x03cut
data/text/prepare  TEXT --tokenizer=none.json | none.json
data/text/prepare  TEXT --val_fraction=1.5 | val_fraction is 1.5
data/text/prepare  TEXT --val_fraction=0.6 --test_fraction=0.4 | sum
data/text/prepare  TEXT --tokenizer=gpt-2 | gpt-2
data/text/prepare  TEXT --tokenizer=bpe:256 | bpe:256
data/text/prepare  TEXT --tokenizer=bpe:many | bpe:many
data/text/prepare  TEXT --tokenizer=bpe:9999999999 | at most 1,048,576
data/text/prepare  TEXT --tokenizer={given}/x.json | x.json | {}
data/text/prepare  TEXT --tokenizer={given}/x.json | x.json | {"version": "\xff"}
data/text/prepare  TEXT --tokenizer={given}/x.tiktoken | x.tiktoken | \xff
data/text/prepare  TEXT --tokenizer={given}/x.tiktoken | x.tiktoken | YQ== 0\nAAAA
data/text/prepare  TEXT --tokenizer={given}/x.tiktoken | single bytes | YQ== 0
data/text/prepare  {given}/x.txt {given}/x.jsonl --out_dir={tmp}/out | falls into | {"text": "x"}
data/text/prepare  {given}/x.txt --out_dir={tmp}/out | or name files: --val= | all in one line
data/text/prepare  {given}/x.txt --out_dir={tmp}/out --val_fraction=0 | --test_fraction=0 | one
data/text/prepare  {given}/x.txt --name= | name is '' | text
data/text/prepare  {given}/x.txt --name=a:2 | name is 'a:2' | text
data/stdlib/prepare --val_fraction=2 | val_fraction is 2
data/stdlib/prepare --val_fraction=0.5 --test_fraction=0.5 | less than 1
data/books/prepare {tmp} --manifest={tmp}/none.json | no manifest
data/books/prepare {tmp} --manifest={given}/x.json | split is valid | [{"split": "valid"}]
data/code/prepare --manifest={tmp}/none.json | no manifest
demo            --train_args=["--n_sample=3"] | n_sample
demo            --tune_args=["--n_sample=3"] | Did you mean 'n_samples'
demo            config/look.py --out_dir={tmp} --text={given}/x.txt | not text in UTF-8 | fine\n\xe4
results/study   --max_iters=4 | Name the folder
results/study   config/code.py --max_iters=4 | Name the folder
bench           --tasks=[] | tasks is empty
data/text/prepare  {given}/x.txt --out_dir={tmp}/out | falls into | most in the first line\n or so
data/books/prepare  --out_dir={tmp}/out | folder
data/pg19/prepare   LOCAL --local={given}/x.txt | .parquet |
data/pg19/prepare   LOCAL --local={given}/x.jsonl | x.jsonl | {"text": "of no split"}
data/pg19/prepare   LOCAL --local={given}/train.jsonl | body, id | {"body": "x", "id": 1}
data/pg19/prepare   LOCAL --local={given}/train.jsonl --max_tokens=0 | max_tokens is | {"text": "x"}
data/pg19/prepare   LOCAL --local={given}/train.parquet | train.parquet | no such thing
train           TRAIN --dataset={corpus}:1,{corpus}:x | NAME:WEIGHT
train           TRAIN --dataset={corpus}:1,{corpus}:-1 | NAME:WEIGHT
train           TRAIN --dataset={corpus}:1,{corpus}:0 | NAME:WEIGHT
train           TRAIN --dataset={corpus}:1,{corpus}:nan | NAME:WEIGHT
train           TRAIN --dataset={corpus}:1,{corpus}:0.00001 | hardly any
train           TRAIN --dataset={corpus}:1e308,{corpus}:1e308 | weights are too large

position methods and their settings
train           TRAIN --position=own | lessons.exercises
train           TRAIN --position=rope,,none | position is
train           TRAIN --position=rope,none,none | position
train           TRAIN --rope_scaling=pi:2 | rope_scaling
train           TRAIN --position=rope --rope_scaling=yarn: | rope_scaling
train           TRAIN --position=rope --rope_scaling=yarn:0.5 | rope_scaling
train           TRAIN --position=rope --rope_scaling=yarn:x | rope_scaling
train           TRAIN --position=rope --rope_scaling=yarn:inf | rope_scaling
train           TRAIN --position=rope --rope_scaling=nope:2 | rope_scaling
train           TRAIN --position=rope --rope_scaling=ntk:1e300 | rope_scaling
train           TRAIN --position=rope --rope_scaling=ntk:2 --n_embd=8 | rope_scaling
train           TRAIN --block_size=1 | block_size
train           TRAIN --dataset={corpus}:1e999 | 1e999
train           TRAIN --position=rope --rope_scaling=2 | rope_scaling
train           TRAIN --rope_share=0.5 | rope_share
train           TRAIN --position=rope --rope_share=1.5 | rope_share
train           TRAIN --position=rope --rope_window=-1 | rope_window
train           TRAIN --position=alibi,none --rope_window=4 | rope_window
train           TRAIN --random_positions=64 | random_positions
train           TRAIN --position=rope --random_positions=31 | random_positions
train           TRAIN --position=rope,logn --random_positions=64 | random_positions
train           TRAIN --position=rope --random_positions=64 --rope_window=4 | random_positions
train           TRAIN --dape_cheat=True | dape_cheat
train           TRAIN --dape_width=64 | dape_width is 64
train           TRAIN --rope_base=5e5 | rope_base is
train           TRAIN --short_conv_at=C | short_conv is 0
train           TRAIN --position=nape_ssmax --random_positions=64 | random_positions is 64
train           TRAIN --short_conv=4 --short_conv_at=ac | short_conv_at is 'ac'
train           TRAIN --dape_kernel=2 | dape_kernel
train           TRAIN --dape_kernel=-1 | dape_kernel
train           TRAIN --dape_kernel=3 --dape_width=0 | dape_width

what is no choice, or does not fit the model, the run or the text
train           TRAIN --position=sinusoidal | position
train           TRAIN --tracker=notebook | tracker is
train           TRAIN --dtype=floaty | dtype
sample          READ --dtype=float16 | dtype is
sample          READ --device=gpu | device is
sample          READ --device=cpu: | device is
sample          READ --device=cuda:99 | device is
train           TRAIN --block_size=1000000 | 1,000,000
train           TRAIN --out_dir={run} | --out_dir=
train           TRAIN --out_dir={run} --init_from={run}/best.pt | --out_dir=
train           RESUME --n_layer=3 | n_layer is 3
train           RESUME --position=rope | position is 'rope'
train           RESUME --block_size=16 | block_size is 16
train           --out_dir={run} --init_from=resume --device=cpu --max_iters=1 | max_iters is 1
train           RESUME --max_iters=99 --batch_size=32 | batch_size is 32
train           TRAIN --init_from={run}/last.pt --n_layer=8 | n_layer is 8
train           FINETUNE | without --block_size= this run would train it at 128
train           TRAIN --init_from={run}/last.pt --rope_base=5e5 | rope_base is
train           TRAIN --init_from={run}/last.pt --dape_kernel=3 | dape_kernel is 3
train           TRAIN --init_from={run}/last.pt --dape_width=64 | dape_width is 64
train           TRAIN --init_from={run}/last.pt --dape_residual=False | dape_residual is False
train           TRAIN --init_from={run}/last.pt --position=kerple | position kerple
train           TRAIN --init_from={run}/last.pt --position=xl | position xl
train           TRAIN --init_from={run}/last.pt --rope_scaling=yarn:2 | rope_scaling is 'yarn:2'
train           FINETUNE {run}/sizes.py | n_hidden is 48
eval_ppl        WRITE --rule=press | rule
eval_ppl        WRITE --protocol=first | protocol
eval_ppl        WRITE --n_samples=2 | protocol sliding does not read n_samples
eval_ppl        WRITE --protocol=tail --gram=4 --tail=8 | protocol tail does not read gram
eval_ppl        WRITE --protocol=repeat --lengths=[63] | lengths is 63
eval_ppl        WRITE --protocol=repeat --gram=0 | gram is 0
eval_ppl        WRITE --protocol=repeat --gram=33 | gram is 33
eval_ppl        WRITE --protocol=repeat --gram=32 --lengths=[65] --n_samples=1 | lower --gram=
eval_ppl        WRITE --protocol=repeat --controls=["far"] | controls has 'far'
eval_ppl        WRITE --protocol=repeat --controls=["other"] --n_samples=1 | n_samples
eval_ppl        WRITE --lengths=[32,40000] | 40000
eval_ppl        WRITE --protocol=position --lengths=[32,50000] | 50,000
entropy         WRITE --length=100000 | 100,000
attention_maps  WRITE --lengths=[32,100000] | 100,000
attention_maps  WRITE --layer=2 | layer is 2
attention_maps  WRITE --head=-1 | head is -1
tune_scale      WRITE --method=layer | method
tune_scale      WRITE --init_scale=best | init_scale
tune_scale      WRITE --init_scale=1.2 --tune=scale,gain | tune
tune_scale      WRITE --init_scale=1.2 --tune=scale:0.05,scale:0.1 | has scale twice
tune_scale      WRITE --init_scale=1.2 --tune=scale,channel | tune
tune_scale      WRITE --init_scale=1.2 --tune=channel --position=rope | channel
tune_scale      WRITE --init_scale=1.2 --target_length=16 | target_length is 16
tune_scale      WRITE --init_scale=1.2 --target_lengths=[32,64] | target_lengths has 32
tune_scale      WRITE --method=uniform --target_length=35 | target_length is 35
tune_scale      WRITE --method=uniform --n_samples=2 --compare=["{run}/longer.pt"] | longer.pt
tune_scale      WRITE --init_scale=1.2 --target_length=0 | target_length is 0
tune_scale      WRITE --init_scale=1.2 --compare=["last.pt"] | compare is for
tune_scale      WRITE --method=uniform --target_lengths=[64] | target_lengths is
tune_scale      WRITE --init_scale=1.2 --target_length=64 --target_lengths=[64] | target_lengths is
passkey         WRITE --protocol=other | protocol
passkey         WRITE --max_length=600 --n_lengths=16 | max_length
passkey         WRITE --max_length=253 --n_lengths=1 --n_depths=1 | length 253
passkey         WRITE --max_length=800 --n_lengths=1 --n_depths=801 | n_depths is 801
data/passkey/prepare --min_length=300 | min_length is 300
data/passkey/prepare --n_documents=-1 | n_documents is -1
data/passkey/prepare --n_documents=100000000000000000000 | n_documents is 1000
data/passkey/prepare --max_length=100000000000000000000 | max_length is 1000
export          EXPORT --scale={run}/sets.json | 32, 64, 128
export          EXPORT --scale={run}/sets.json --target_length=31 | target_length is 31
export          EXPORT --scale={run}/sets.json --target_length=129 | target_length is 129
export          EXPORT --target_length=64 | --scale=None
export          EXPORT --dtype=int8 | dtype is 'int8'
export          EXPORT --format=onnx | format is 'onnx'
export          EXPORT --ids_only=True | ids_only is for --format=gguf
export          EXPORT --format=gguf --position=alibi | alibi
export          EXPORT --format=gguf --position=rope,none | rope,none
export          EXPORT --format=gguf --position=rope --rope_scaling=dynamic_ntk:2 | dynamic_ntk
che             CHE --tasks=["even_pair"] | even_pair
che             CHE --tasks=["copy+recal"] | recal
che             CHE --tasks=["copy+recall","copy"] | twice
che             CHE --lengths=[7,8] | lengths is
che             CHE --position=kerpel | 'kerpel'
bench           --tasks=["trains"] | train, scale
results/bench/table --table=costs | time_cost, growth, memory
results/extension_demo/table --protocol=position | protocol is
results/scoreboard/table --methods=["kerpel"] | kerpel
results/scoreboard/table --size=large | large
results/past_L/table --models=["zzz"] | 'zzz' is not one of conv
bench           --peer=vllm | hf
bench           --like=["config/tune_8k.py"] | n_layer
bench           --like=["{run}/conv.py"] | short_conv_at
lessons/evaluation  READ --lengths=[0] | lengths is
commonsense     READ --tasks=[] | tasks is empty
longbench       WRITE --tasks=["treck"] | narrativeqa, qasper
longbench       WRITE --paper=NoPE | RoPE 2K
longbench       WRITE --data=nowhere --tasks=["trec"] | trec.jsonl

scales that are infinite in float32, or 0
passkey         WRITE --scale=1e39 | scale
eval_ppl        WRITE --scale=1e-60 | scale
eval_ppl        WRITE --scale=0 | scale
eval_ppl        WRITE --scale=nan | scale
eval_ppl        WRITE --scale=-0.5 | scale
export          EXPORT --scale=1e7 --dtype=float16 | self_attn.q_proj.weight
tune_scale      WRITE --init_scale=1e39 | init_scale
tune_scale      WRITE --init_scale=1.2 --min_scale=1e39 | min_scale
tune_scale      WRITE --method=uniform --candidate_range=[1.0,1e39,1e38] | candidate_range
tune_scale      WRITE --method=uniform --candidate_range=[1.0,2.0,1e-9] | candidate_range
tune_scale      WRITE --method=uniform --candidate_range=[0.0,1.0,0.1] | candidate_range
tune_scale      WRITE --method=uniform --candidate_range=[1e-7,1.0,0.5] | candidate_range
tune_scale      WRITE --method=uniform --candidate_range=[2.0,1.0,0.1] | candidate_range
tune_scale      WRITE --method=uniform --candidate_range=[1.0,2.0,0.0] | candidate_range

seeds, sizes and rates out of bounds, or more than numpy and torch take
sample          READ --seed=-1 | seed is
sample          READ --max_new_tokens=100000000000000000000 | max_new_tokens is
passkey         WRITE --seed=100000000000000000000 | seed is
train           TRAIN --seed=-1 | seed is
train           TRAIN --learning_rate=1e999 | learning_rate is inf
train           TRAIN --learning_rate=-1.0 | learning_rate is
train           TRAIN --beta2=1.0 | beta2
train           TRAIN --position=rope --rope_base=0 | rope_base is
train           TRAIN --n_head=5 | n_head
train           TRAIN --n_kv_head=3 | n_kv_head
train           TRAIN --n_kv_head=0 | n_kv_head
train           TRAIN --n_embd=36 --n_head=12 --n_kv_head=12 | n_head
train           TRAIN --n_layer=0 | n_layer
train           TRAIN --micro_batch_size=3 | micro_batch_size
train           TRAIN --micro_batch_size=0 | micro_batch_size
train           TRAIN --max_iters=0 | max_iters
train           TRAIN --eval_windows=0 | eval_windows
train           TRAIN --fsdp=True | fsdp
tune_scale      WRITE --init_scale=1.2 --beta1=1.5 | beta1 is
tune_scale      WRITE --init_scale=1.2 --tune=scale:-1 | scale:-1
eval_ppl        WRITE --n_samples=0 | n_samples
eval_ppl        WRITE --stride=0 | stride
entropy         WRITE --n_samples=0 | n_samples
che             CHE --seed=-1 | seed is
che             CHE --n_test=0 | n_test is 0
che             CHE --learning_rate=-1 | learning_rate is
bench           --rounds=0 | rounds is 0
results/bench/table --contexts=[0] | contexts is
results/extension_demo/table --lengths=[0] | lengths is
results/extension_demo/table --max_windows=0 | max_windows is 0
commonsense     READ --limit=0 | limit is 0
commonsense     READ --tasks=["ruler_vt"] --read_length=1023 | prompts of ruler_vt.
longbench       WRITE --beams=0 | beams is 0
longbench       WRITE --context=0 | context is 0
longbench       WRITE --max_samples=0 | max_samples is 0

windows shorter than what is measured in them
entropy         WRITE --length=1 | length is 1; it must be at least 2, the width of a bin, L / 16
eval_ppl        WRITE --protocol=position --lengths=[1] | lengths is
eval_ppl        WRITE --protocol=tail --lengths=[-3,32] | lengths is
eval_ppl        WRITE --protocol=tail --lengths=[48,64] --tail=50 | tail is
eval_ppl        WRITE --stride=32 | stride
tune_scale      WRITE --method=uniform --tail=0 | tail is
che             CHE --test_length=6 | test_length is 6
che             CHE --position=kerple --random_positions=9 | below 9
'''


@pytest.fixture(scope='module')
def places(tiny_run, corpus_dir, other_tokenizer, tmp_path_factory):
    """What the names in braces stand for, but {tmp}."""
    folder = tmp_path_factory.mktemp('refusals')
    run = shutil.copytree(tiny_run, folder / 'run')
    _, info = checkpoints.load_model('last', run, 'cpu')
    save_scale(run / 'sets.json', info, {T: scale_set([[1.5] * 4] * 2) for T in (64, 128)}, 'head')
    uneven = json.loads((run / 'sets.json').read_text())
    uneven['sets'][0]['norm'] = {'norm.weight': [1.0] * info['model_config']['n_embd']}
    (run / 'uneven.json').write_text(json.dumps(uneven))
    state = torch.load(run / 'last.pt', weights_only=True)
    longer = state | {'model_config': state['model_config'] | {'block_size': 64}}
    checkpoints.save(run / 'longer.pt', **longer)
    state['model']['norm.weight'][0] = math.nan
    checkpoints.save(run / 'nan.pt', **state)
    for name, text in {
            'passkey.jsonl': '{}\n{"item": 0}\n',
            'passkey.json': '{"stage": "passkey"}',
            'gap.json': ('{"stage": "entropy", "position": [1], "loss": [null], '
                         '"mean_entropy": [1]}'),
            'conv.py': "n_layer = 1\nshort_conv_at = 'A'\n",
            'sizes.py': 'n_hidden = 48\n'}.items():
        (run / name).write_text(text)
    places = {'run': run, 'corpus': corpus_dir, 'other': other_tokenizer}
    for name, whole, files in (('flipped_run', run, ['last.pt']),
                               ('flipped_train', corpus_dir, ['train.bin']),
                               ('flipped_corpus', corpus_dir, ['val.bin', 'test.bin'])):
        places[name] = shutil.copytree(whole, folder / name)
        for file in files:
            path = folder / name / file
            flip_a_bit(path, path.stat().st_size // 10)  # in a checkpoint, of a weight
    return places


@pytest.mark.parametrize('line', [line for line in MISTAKES.splitlines() if '|' in line])
def test_a_mistake_is_refused_in_one_line_that_names_it(places, tmp_path, line):
    command, named, *given = re.split(r' \|(?: |$)', line)
    stage, *words = ' '.join(SHORT.get(word, word) for word in command.split()).split()
    names = places | {'tmp': tmp_path / 'empty', 'given': tmp_path / 'given'}
    for folder in names['tmp'], names['given']:
        folder.mkdir()
    for content in given:
        content = content.replace('DEEP', '[' * 100_000).encode().decode('unicode_escape')
        for name in GIVEN.split():
            (names['given'] / name).write_bytes(content.encode('latin-1'))
    before = contents(places['run'])
    line = mistake(stage, *(word.format(**names) for word in words))
    if 'needs the optional package' in line:
        pytest.skip(line)
    assert named.replace('{run}', str(places['run'])) in line
    assert contents(names['tmp']) == {} and before.items() <= contents(places['run']).items()
