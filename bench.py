"""
How fast the stages run, beside what the hardware could do, and beside transformers' Llama on the
same work.

$ python bench.py                                  # the CPU bench shape: 8 layers x 512, T = 1,024, vocabulary 32,000
$ python bench.py --peer=hf                        # transformers' Llama turn by turn with ours, needs transformers
$ python bench.py --like="['config/nope_1b.py']" --position=none --tasks="['train','scale']"   # a config's model
$ python bench.py --table=time_cost --like="['config/dape/125m.py','config/dape/350m.py']"   # Table 7 of DAPE V2
$ python bench.py --table=growth                   # time and memory of a training step against the context
$ python bench.py --table=memory --like="['config/nope_1b.py']" --contexts=[4096,8192,18432]    # head-scale step alone

Every figure is the median of `rounds` calls. The limit is the rate of a large matrix product,
measured on the same device in the same precision: what the arithmetic alone would take. In decoding
it is that of reading every weight and key once, at the measured memory bandwidth. Writes
out_dir/NAME.json.
"""

import itertools
import json
import os
import statistics
import sys
import time
from pathlib import Path

import torch
import torch.nn.functional as F
from torch.func import functional_call

from checkpoint import cast_matrices
from configurator import at_least, configure, run_config, settings
from generate import by_column
from model import Attention, ModelConfig, Transformer, matrices
from runtime import (
    ROOT,
    compiled,
    keep_freed_memory,
    matmul_flops,
    optional,
    provenance,
    save_json,
    setup,
    synchronize,
)

tasks = ['train', 'scale', 'eval', 'entropy', 'prefill', 'decode']
table = ''                   # instead of tasks: time_cost (position methods), growth or memory (contexts)
peer = ''                    # hf: transformers' Llama does the same work, by turns
out_dir = 'results/bench'
name = ''                    # of the result; empty: the table's or cpu, cuda
# the model
like: list[str] = []         # training configs to take it from, and their block_size as context
position = 'rope'            # as the peer has it; without it a model is a little faster
n_layer = 8
n_head = 8
n_kv_head = 2
n_embd = 512
n_hidden = 1408
vocab_size = 32000
dape_kernel = 0
dape_width = 32
# the work
context = 1024               # T: tokens in a sequence
batch_size = 4               # sequences in a training or tuning step
read_context = 4096          # tokens already read in prefill, decode and entropy
contexts = [1024, 2048, 4096, 8192, 16384, 32768]  # of the tables growth and memory
n_decode = 32                # tokens decoded in a round
rounds = 7
profile = False              # also show which operators the time of a task goes to
# machine
device = 'auto'              # auto, cpu, cuda
dtype = 'auto'               # of activations in training and evaluation; the rest is float32 on a CPU
compile = True               # training steps, ours and the peer's
seed = 1337

MODEL_SETTINGS = 'position', 'n_layer', 'n_head', 'n_kv_head', 'n_embd', 'n_hidden', 'dape_kernel', 'dape_width'
METHODS = {  # of Table 7
    'RoPE': {'position': 'rope'}, 'T5': {'position': 't5'}, 'ALiBi': {'position': 'alibi'},
    'Kerple': {'position': 'kerple'}, 'FIRE': {'position': 'fire'}, 'CoPE': {'position': 'cope'},
    'DAPE-Kerple': {'position': 'kerple', 'dape_kernel': 1},
    'DAPE 1x3-Kerple': {'position': 'kerple', 'dape_kernel': 3},
}


# ----------------------------------------------------------------------------- measuring

LATE_GRAPHS = []  # how many were compiled after the warm-up, of each measurement


def medians(works, runtime):
    """
    Seconds per call of each function of {name: function}, which take turns, as machines are noisy,
    after two rounds to warm up. What is compiled later is counted in LATE_GRAPHS.
    """
    times = {name: [] for name in works}
    for turn in range(rounds + 2):
        if turn == 2:
            graphs = torch._dynamo.utils.counters['stats']['unique_graphs']
        for name, work in works.items():
            synchronize(runtime.device)
            start = time.perf_counter()
            work()
            synchronize(runtime.device)
            times[name].append(time.perf_counter() - start)
    LATE_GRAPHS.append(torch._dynamo.utils.counters['stats']['unique_graphs'] - graphs)
    return {name: statistics.median(seconds[2:]) for name, seconds in times.items()}


def peak_memory(work, runtime):
    """Bytes of tensors that a call holds at most, beyond what was held before it."""
    if runtime.device.type == 'cuda':
        before = torch.cuda.memory_allocated()
        torch.cuda.reset_peak_memory_stats()
        work()
        return torch.cuda.max_memory_allocated() - before
    with torch.profiler.profile(profile_memory=True) as profiler:
        work()
    changes = [event for event in profiler.profiler.kineto_results.events() if event.name() == '[memory]']
    changes.sort(key=lambda event: event.start_ns())
    return max(itertools.accumulate((event.nbytes() for event in changes), initial=0))


def by_operator(work, runtime):
    """Seconds that a call spends in each operator, {name: seconds} of the ten longest."""
    kind = 'device' if runtime.device.type == 'cuda' else 'cpu'
    with torch.profiler.profile() as profiler:
        work()
        synchronize(runtime.device)
    seconds = {event.key: getattr(event, f'self_{kind}_time_total') / 1e6 for event in profiler.key_averages()}
    return dict(sorted(seconds.items(), key=lambda item: -item[1])[:10])


def memory_bandwidth(runtime):
    """Bytes a second read by a sum over 256 MB."""
    x = torch.ones(2 ** 26, device=runtime.device)
    return x.numel() * 4 / min(medians({'sum': x.sum}, runtime).values())


def row(task, works, tokens, limit, runtime):
    """
    Print and return the figures of a task: {name: {seconds, tokens_per_second, of_limit,
    peak_memory}}. limit: the seconds that it cannot be faster than, or {name: seconds}. With
    `profile` also where the time goes, `operators`.
    """
    seconds = medians(works, runtime)
    limits = limit if isinstance(limit, dict) else dict.fromkeys(works, limit)
    result = {'task': task, 'tokens': tokens, 'limit_seconds': limits}
    for who, work in works.items():
        result[who] = {'seconds': seconds[who], 'tokens_per_second': tokens / seconds[who],
                       'of_limit': limits[who] / seconds[who], 'peak_memory': peak_memory(work, runtime)}
        memory = result[who]['peak_memory']
        times = '' if who == 'ours' else f'   ours is {seconds[who] / seconds["ours"]:.2f}x as fast'
        print(f'{task:24} {who:14} {seconds[who] * 1e3:10.2f} ms {tokens / seconds[who]:12,.0f} tokens/s '
              f'{limits[who] / seconds[who]:5.0%} of the limit {memory / 1e6:8,.0f} MB{times}')
        if profile:
            result[who]['operators'] = by_operator(work, runtime)
            for operator, taken in result[who]['operators'].items():
                print(f'{taken * 1e3:50.2f} ms {operator}')
    return result


# ----------------------------------------------------------------------------- the work

def new_model(runtime, block_size, **changes):
    torch.manual_seed(seed)
    sizes = {'position': position, 'dape_kernel': dape_kernel, 'dape_width': dape_width} | changes
    return Transformer(ModelConfig(vocab_size, block_size, n_layer, n_head, n_kv_head, n_embd, n_hidden,
                                   **sizes)).init_weights().to(runtime.device)


def new_peer(runtime, block_size):
    transformers = optional('transformers')
    return transformers.LlamaForCausalLM(transformers.LlamaConfig(
        vocab_size=vocab_size, hidden_size=n_embd, intermediate_size=n_hidden, num_hidden_layers=n_layer,
        num_attention_heads=n_head, num_key_value_heads=n_kv_head, max_position_embeddings=block_size,
        rms_norm_eps=1e-5, tie_word_embeddings=False, attn_implementation='sdpa')).to(runtime.device)


def training_step(parameters, loss_of, runtime):
    """
    A function that does one step: loss, backward, clipping, optimizer, as train.py and
    tune_scale.py do it.
    """
    parameters = list(parameters)
    fused = runtime.device.type in ('cpu', 'cuda')
    optimizer = torch.optim.AdamW(parameters, lr=1e-5, betas=(0.9, 0.95), weight_decay=0.1, fused=fused)

    def step():
        with runtime.autocast():
            loss = loss_of()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(parameters, 1.0)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
    return step


def our_step(model, T, runtime, B=None):
    """A training step on random tokens, of all parameters of `model` that want gradients."""
    x, y = torch.randint(vocab_size, (2, B or batch_size, T), device=runtime.device)
    forward = compiled(model, runtime, compile)

    def loss():
        half = {name: p.to(runtime.dtype) for name, p in matrices(forward).items()}
        return functional_call(forward, half, (x, y)).mean()
    return training_step([p for p in model.parameters() if p.requires_grad], loss, runtime)


def our_forward(model, T, runtime):
    """A plain forward pass over one sequence, uncompiled."""
    x, y = torch.randint(vocab_size, (2, 1, T), device=runtime.device)

    @torch.no_grad()
    def forward():
        with runtime.autocast():
            model(x, y)
    return forward


def head_scale_only(model, runtime):
    """The model as tune_scale.py tunes it."""
    for name, p in cast_matrices(model, runtime.dtype).named_parameters():
        p.requires_grad_(name.endswith('head_scale'))
    return model


def reading_flops(model, T, last):
    """
    FLOP of reading T tokens for the logits of the last few: for the others the last layer makes
    keys and values.
    """
    (matmul, attention), head = model.flops_per_token(T), 2 * model.head.weight.numel()
    after = 2 * sum(p.numel() for part in (model.blocks[-1].attn.out, model.blocks[-1].mlp) for p in part.parameters())
    unread = T * (matmul - head + attention) - (T - last) * after
    return unread - (T - last) ** 2 / T * attention / n_layer + last * head  # attention of a row grows with its place


def train(runtime, ceiling):
    model = new_model(runtime, context)
    works = {'ours': our_step(model, context, runtime)}
    if peer:
        llama = new_peer(runtime, context)
        x = torch.randint(vocab_size, (batch_size, context), device=runtime.device)
        forward = compiled(llama, runtime, compile)
        works['transformers'] = training_step(llama.parameters(), lambda: forward(x, labels=x).loss, runtime)
    tokens = batch_size * context
    return row('training step', works, tokens, 3 * tokens * sum(model.flops_per_token(context)) / ceiling, runtime)


def scale(runtime, ceiling):
    """
    A step of head-scale tuning beside a whole training step, and the ratio by arithmetic, in which
    attention costs 3.5 times its forward pass, as where backward computes the scores again.
    """
    model = new_model(runtime, context)
    works = {'ours': our_step(head_scale_only(new_model(runtime, context), runtime), context, runtime),
             'whole step': our_step(model, context, runtime)}
    matmul, attention = model.flops_per_token(context)  # 2P and a
    tokens = batch_size * context
    limits = {who: tokens * (passes * matmul + 3 * attention) / ceiling
              for who, passes in (('ours', 2), ('whole step', 3))}
    wanted = (2 * matmul + 3.5 * attention) / (3 * matmul + 3.5 * attention)
    result = row('head-scale step', works, tokens, limits, runtime)
    result['ratio'] = result['ours']['seconds'] / result['whole step']['seconds']
    print(f'{"":24} {result["ratio"]:.2f} of the whole step; arithmetic: (4P + 3.5a) / (6P + 3.5a) = {wanted:.2f}')
    return result | {'ratio_by_arithmetic': wanted}


@torch.no_grad()
def sliding_windows(runtime, ceiling):
    """
    Windows that score their last L/8 tokens: a batch, only those logits; against one by one with
    all logits.
    """
    model, n = new_model(runtime, context).requires_grad_(False), 16
    idx, S = torch.randint(vocab_size, (n, context + 1), device=runtime.device), -(-context // 8)

    def one_by_one(logits_of):
        return sum(F.cross_entropy(logits_of(window[None, :-1])[0].float(), window[1:], reduction='none')[-S:].sum()
                   for window in idx)

    works = {'ours': lambda: model(idx[:, :-1], idx[:, -S:]).double().sum(), 'one by one': lambda: one_by_one(model)}
    if peer:
        llama = new_peer(runtime, context).requires_grad_(False)
        works['transformers'] = lambda: one_by_one(lambda window: llama(window).logits)
    with runtime.autocast():
        return row('sliding windows', works, n * context, n * reading_flops(model, context, S) / ceiling, runtime)


def entropy(runtime, ceiling):
    """
    Entropy of every head of a layer, by the kernel and by the float32 matrix, written in place.
    """
    attention = new_model(runtime, context).blocks[0].attn.requires_grad_(False)
    q = torch.randn(1, n_head, read_context, n_embd // n_head, device=runtime.device)
    k = q[:, :n_kv_head].contiguous()
    later = torch.ones(read_context, read_context, dtype=torch.bool, device=runtime.device).triu(1)

    def matrix():
        s = q @ k.repeat_interleave(n_head // n_kv_head, 1).transpose(-1, -2)
        s.mul_((n_embd // n_head) ** -0.5).masked_fill_(later, -float('inf'))
        a = s.sub_(s.logsumexp(-1, keepdim=True)).exp()
        return -a.mul_(s.masked_fill_(later, 0)).sum(-1)

    flops = 2 * n_embd * read_context ** 2  # q.k and the sum of keys, half of the square
    return row(f'entropy, T = {read_context}', {'ours': lambda: attention.entropy(q, k), 'matrix': matrix},
               read_context, flops / matmul_flops(runtime.device, torch.float32), runtime)


def reader(runtime):
    """A model in the precision that a GPU or else float32 reads in, the same for both sides."""
    dtype = runtime.dtype if runtime.device.type == 'cuda' else torch.float32
    return new_model(runtime, read_context).requires_grad_(False).to(dtype), dtype


@torch.no_grad()
def prefill(runtime, ceiling):
    model, dtype = reader(runtime)
    idx = torch.randint(vocab_size, (1, read_context), device=runtime.device)
    by_column(model)
    works = {'ours': lambda: model(idx, last=1, cache=model.new_cache(1, read_context + n_decode)),
             'plain pass': lambda: model.hidden(idx)}
    if peer:
        llama = new_peer(runtime, read_context).requires_grad_(False).to(dtype)
        works['transformers'] = lambda: llama(idx, use_cache=True, logits_to_keep=1)
    limit = reading_flops(model, read_context, 1) / matmul_flops(runtime.device, dtype)
    return row(f'prefill, T = {read_context}', works, read_context, limit, runtime)


@torch.no_grad()
def decode(runtime, ceiling):
    """Tokens one by one, greedy, after read_context; the prompt's pass is not counted."""
    model, dtype = reader(runtime)
    idx = torch.randint(vocab_size, (1, read_context), device=runtime.device)
    by_column(model)
    cache = model.new_cache(1, read_context + n_decode)
    first = model(idx, last=1, cache=cache)[:, -1].argmax(-1, keepdim=True)

    def ours():
        cache.length, token = read_context, first
        for _ in range(n_decode):
            token = model(token, last=1, cache=cache)[:, -1].argmax(-1, keepdim=True)

    works = {'ours': ours}
    if peer:
        llama = new_peer(runtime, read_context).requires_grad_(False).to(dtype)
        theirs = llama(idx, use_cache=True, logits_to_keep=1).past_key_values

        def transformers():
            if (extra := theirs.get_seq_length() - read_context):
                theirs.crop(-extra)
            token = first
            for _ in range(n_decode):
                token = llama(token, past_key_values=theirs, use_cache=True).logits[:, -1].argmax(-1, keepdim=True)
        works['transformers'] = transformers
    item = torch.finfo(dtype).bits // 8
    weights = model.n_params() - model.embed.weight.numel()
    keys = 2 * n_layer * n_kv_head * (n_embd // n_head) * (read_context + n_decode / 2)
    floor = n_decode * item * (weights + keys) / memory_bandwidth(runtime)
    return row(f'decode, T = {read_context}', works, n_decode, floor, runtime)


# ----------------------------------------------------------------------------- tables

class WholeMatrix(Attention):
    """Attention that computes all scores at once, as the code of DAPE V2 does for every method."""

    def attend_in_rows(self, q, k, v, i, j):
        a = self.scores(q, k, i, j).softmax(-1, dtype=torch.float32).to(v.dtype)
        return a @ v.repeat_interleave(n_head // n_kv_head, dim=1)


def time_cost(runtime, ceiling):
    """
    Table 7 of DAPE V2: a training step and a forward pass of each method, and their ratios to DAPE
    1x3-Kerple's.
    """
    paper, rows = json.loads((ROOT / 'results/papers.json').read_text())['dape_table7'], []
    column = {2560: 1, 4096: 2}.get(n_embd, 0)  # by width: 2.7B, 6.7B; beside all others 350M
    dape = new_model(runtime, context, **METHODS['DAPE 1x3-Kerple'])
    dape = {'DAPE': our_step(dape, context, runtime, B=1), 'DAPE forward': our_forward(dape, context, runtime)}
    print(f'{f"training step, T = {context}, batch 1":32}       ms   ratio to DAPE 1x3-Kerple   '
          f"in the paper, {paper['columns'][column]}   forward")
    for method, changes in {**METHODS, 'Kerple, whole matrix': METHODS['Kerple']}.items():  # two models at a time
        model = new_model(runtime, context, **{'dape_kernel': 0} | changes)
        for block in model.blocks if 'matrix' in method else ():
            block.attn = WholeMatrix(model.config).to(runtime.device)
        seconds = medians({method: our_step(model, context, runtime, B=1),
                           'forward': our_forward(model, context, runtime), **dape}, runtime)
        theirs = paper['rows'].get(method, [None] * 3)[column]
        rows.append({'method': method, 'seconds': seconds[method], 'ratio': seconds[method] / seconds['DAPE'],
                     'paper_ratio': theirs and theirs / paper['rows']['DAPE 1x3-Kerple'][column],
                     'forward_seconds': seconds['forward'],
                     'forward_ratio': seconds['forward'] / seconds['DAPE forward']})
        theirs = f"{rows[-1]['paper_ratio']:20.2f}" if theirs else ' ' * 20
        print(f"{method:32} {rows[-1]['seconds'] * 1e3:8.1f} {rows[-1]['ratio']:26.2f} {theirs} "
              f"{rows[-1]['forward_ratio']:9.2f}")
    kerple = next(row for row in rows if row['method'] == 'Kerple')
    added = kerple['seconds'] * (1 / kerple['ratio'] - 1) / n_layer
    print(f"DAPE 1x3-Kerple takes {1 / rows[-1]['ratio']:.2f}x Kerple with the whole matrix, and "
          f"{1 / kerple['ratio']:.2f}x our Kerple: {added * 1e3:.2f} ms more a layer; "
          f"forward {1 / kerple['forward_ratio']:.2f}x")
    return rows


def growth(runtime, ceiling):
    """
    Time and memory of steps on one sequence of T tokens, of head-scale tuning (ours) and of
    training, activations recomputed: linear and quadratic in T, as the arithmetic of their limits
    says. Memory is beyond weights and optimizer.
    """
    frozen, model = head_scale_only(new_model(runtime, max(contexts)), runtime), new_model(runtime, max(contexts))
    frozen.checkpoint_activations = model.checkpoint_activations = True
    rows = []
    for T in contexts:
        matmul, attention = model.flops_per_token(T)
        # passes' worth of the products: forward, again, and two in backward, or one without
        # gradients of weights
        linear = {'ours': T * 3 * matmul / ceiling, 'whole step': T * 4 * matmul / ceiling}
        quadratic = T * 4 * attention / ceiling
        works = {'ours': our_step(frozen, T, runtime, B=1), 'whole step': our_step(model, T, runtime, B=1)}
        result = row(f'head-scale step, T = {T}', works, T, {who: x + quadratic for who, x in linear.items()}, runtime)
        rows.append(result | {'linear_seconds': linear, 'quadratic_seconds': quadratic})
    return rows


def memory(runtime, ceiling):
    """
    Peak memory of a head-scale step on one sequence of T tokens, activations recomputed, beyond the
    weights. One call.
    """
    model, rows = head_scale_only(new_model(runtime, max(contexts)), runtime), []
    model.checkpoint_activations = True
    weights = sum(p.numel() * p.element_size() for p in model.parameters())
    keep_freed_memory(2 ** 25)  # a heap with holes would be too large for a small machine
    print(f'head-scale step of {model.n_params():,} parameters, weights of {weights / 1e9:.2f} GB')
    for T in contexts:
        began, work = time.perf_counter(), our_step(model, T, runtime, B=1)
        peak = peak_memory(work, runtime)
        rows.append({'length': T, 'peak_memory': peak, 'per_token': peak / T, 'weights': weights,
                     'seconds': time.perf_counter() - began})
        print(f'{T:8,d} tokens {peak / 1e9:8.2f} GB {peak / T / 1e3:8.1f} kB a token', flush=True)
    return rows


def main():
    began, runtime = time.perf_counter(), setup(device, dtype, seed)
    given = {argument.partition('=')[0].removeprefix('--') for argument in sys.argv[1:]}
    if like:
        values = {name: value for config in like for name, value in run_config(config).items()}
        if 'n_layer' not in values:
            raise ValueError(f'like is {like}, which sets no n_layer: give the config that the model is trained with.')
        values = {'position': 'none', 'context': values.get('block_size', context)} | values
        globals().update({key: values[key] for key in (*MODEL_SETTINGS, 'context') if key in values.keys() - given})
    stages = {'train': train, 'scale': scale, 'eval': sliding_windows, 'entropy': entropy, 'prefill': prefill,
              'decode': decode}
    tables = {'time_cost': time_cost, 'growth': growth, 'memory': memory}
    if not set(tasks) <= set(stages):
        raise ValueError(f"tasks is {tasks}. Choose from: {', '.join(stages)}.")
    if table and table not in tables:
        raise ValueError(f"table is '{table}'. Choose {', '.join(tables)}, or leave it empty.")
    if peer not in ('', 'hf'):
        raise ValueError(f"peer is '{peer}'. Choose hf, or leave it empty.")
    if runtime.world_size > 1:
        raise ValueError('bench.py measures one device: start it without torchrun.')
    at_least(1, globals(), 'context', 'batch_size', 'read_context', 'contexts', 'n_decode', 'rounds')
    Path(out_dir).mkdir(parents=True, exist_ok=True)
    torch._dynamo.config.fail_on_recompile_limit_hit = True  # or it would silently go on uncompiled
    os.environ.setdefault('KINETO_LOG_LEVEL', '6')  # or each profile, of memory too, announces itself
    ceiling = matmul_flops(runtime.device, runtime.dtype)
    print(f'{runtime.device.type}, {torch.get_num_threads()} threads, torch {torch.__version__}, {runtime.dtype}: '
          f'a large matrix product does {ceiling / 1e12:.2f} TFLOP/s')
    todo = {table: tables[table]} if table else {task: stages[task] for task in tasks}
    results = {what: work(runtime, ceiling) for what, work in todo.items()}
    print(f'graphs compiled after the warm-up: {sum(LATE_GRAPHS)}')
    path = Path(out_dir, f'{name or table or runtime.device.type}.json')
    save_json(path, {'stage': 'bench', 'matmul_flops': ceiling, 'late_graphs': sum(LATE_GRAPHS), 'results': results}
              | provenance(settings(globals()), runtime, time.perf_counter() - began))
    print(f'wrote {path}')


if __name__ == '__main__':
    configure(globals())
    main()
