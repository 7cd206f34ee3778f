"""
How fast the stages run, beside what the hardware could do, and beside transformers' Llama on the
same work.

$ python bench.py              # the CPU bench shape: 8 layers x 512, T = 1,024, vocabulary 32,000
$ python bench.py --peer=hf    # transformers' Llama turn by turn with ours, needs transformers
$ python bench.py --like="['config/nope_1b.py']" --tasks="['train','scale']"   # a config's model
$ python bench.py --table=time_cost --like="['config/dape/125m.py']"   # Table 7 of DAPE V2
$ python bench.py --table=growth   # time and memory of a training step against the context
$ python bench.py --table=memory --like="['config/nope_1b.py']" --contexts=[4096,8192,18432]

Every figure is the median of `rounds` calls. The limit is what the arithmetic alone would take at
the rate of a large matrix product, measured on the same device in the same precision; in decoding
it is that of reading every weight and key once, at the measured memory bandwidth. Writes
out_dir/NAME.json.
"""

import dataclasses
import functools
import json
import math
import os
import statistics
import time
from functools import partial
from operator import attrgetter

import torch
import torch.nn.functional as F

import kernels
import position as methods
from configurator import between, configure, run_config, settings
from lib.checkpoints import cast_matrices
from lib.devices import compiled, keep_freed_memory, matmul_flops, setup, synchronize
from lib.errors import ROOT, UserError, as_user_error
from lib.generate import new_cache, store_by_column
from lib.results import optional, provenance, result_path, save_json
from model import ModelConfig, Transformer

tasks = ['train', 'scale', 'eval', 'entropy', 'prefill', 'decode']
table = ''                   # instead of tasks: time_cost (methods), growth or memory (contexts)
peer = ''                    # hf: transformers' Llama does the same work, by turns
out_dir = 'results/bench'
name = ''                    # of the result; empty: the table's or cpu, cuda
# the model; the other settings of its position method are declared in position.py
like: list[str] = []         # training configs to take it from, and their block_size as context
position = 'rope'            # as the peer has it; without it a model is a little faster
n_layer = 8
n_head = 8
n_kv_head = 2
n_embd = 512
n_hidden = 1408
vocab_size = 32000
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
dtype = 'auto'               # in training and evaluation; the rest is float32 on a CPU
compile = True               # training steps, ours and the peer's
seed = 1337

METHOD = dataclasses.asdict(methods.Settings())  # settings of position methods, and their defaults
MODEL = (*METHOD, 'n_layer', 'n_head', 'n_kv_head', 'n_embd', 'n_hidden')
TABLE_7 = {  # its names, and ours for method and DAPE's kernel
    'RoPE': ('rope', 0),
    'T5': ('t5', 0),
    'ALiBi': ('alibi', 0),
    'Kerple': ('kerple', 0),
    'FIRE': ('fire', 0),
    'CoPE': ('cope', 0),
    'DAPE-Kerple': ('kerple', 1),
    'DAPE 1x3-Kerple': ('kerple', 3),
    'Kerple, whole matrix': ('kerple', 0),
}


# ---------------------------------------------------------------------- measuring

LATE_GRAPHS = []  # how many were compiled after the warm-up, of each measurement
rate = functools.cache(matmul_flops)  # measured once, so that all limits of a run agree


def compiled_graphs():
    return torch._dynamo.utils.counters['stats']['unique_graphs']


def one_turn(works, runtime):
    """Seconds of one call of each function of {name: function}."""
    seconds = {}
    for who, work in works.items():
        synchronize(runtime.device)
        start = time.perf_counter()
        work()
        synchronize(runtime.device)
        seconds[who] = time.perf_counter() - start
    return seconds


def medians(works, runtime):
    """
    Median seconds of each function over rounds in which they take turns, as machines are noisy,
    after two to warm up. What is compiled later is counted in LATE_GRAPHS.
    """
    for _ in range(2):
        one_turn(works, runtime)
    before = compiled_graphs()
    turns = [one_turn(works, runtime) for _ in range(rounds)]
    LATE_GRAPHS.append(compiled_graphs() - before)
    return {who: statistics.median(turn[who] for turn in turns) for who in works}


def peak_memory(work, runtime):
    """Bytes of tensors that a call holds at most, beyond what was held before it."""
    if runtime.device.type == 'cuda':
        before = torch.cuda.memory_allocated()
        torch.cuda.reset_peak_memory_stats()
        work()
        return torch.cuda.max_memory_allocated() - before
    with torch.profiler.profile(profile_memory=True) as profiler:
        work()
    held, most = 0, 0
    events = profiler.profiler.kineto_results.events()
    for event in sorted(events, key=lambda event: event.start_ns()):
        if event.name() == '[memory]':
            held += event.nbytes()
            most = max(most, held)
    return most


def by_operator(work, runtime):
    """{name: seconds} of the ten operators in which a call spends the most."""
    with torch.profiler.profile() as profiler:
        work()
        synchronize(runtime.device)
    kind = 'device' if runtime.device.type == 'cuda' else 'cpu'
    seconds = attrgetter(f'self_{kind}_time_total')
    longest = sorted(profiler.key_averages(), key=seconds, reverse=True)[:10]
    return {event.key: seconds(event) / 1e6 for event in longest}


def measure(task, works, tokens, limits, runtime):
    """
    Print and return the figures of a task: {name: {seconds, tokens_per_second, of_limit,
    peak_memory}}. limits: the seconds that it cannot be faster than, or {name: seconds}. With
    `profile` also where the time goes, `operators`.
    """
    if not isinstance(limits, dict):
        limits = dict.fromkeys(works, limits)
    result = {'task': task, 'tokens': tokens, 'limit_seconds': limits}
    for who, seconds in medians(works, runtime).items():
        row = {'seconds': seconds, 'tokens_per_second': tokens / seconds,
               'of_limit': limits[who] / seconds, 'peak_memory': peak_memory(works[who], runtime)}
        result[who] = row
        times = seconds / result['ours']['seconds']
        print(f'{task:24} {who:14} {seconds * 1e3:10.2f} ms {tokens / seconds:12,.0f} tokens/s '
              f"{row['of_limit']:5.0%} of the limit {row['peak_memory'] / 1e6:8,.0f} MB"
              f'{times:8.2f} times ours')
        if profile:
            row['operators'] = by_operator(works[who], runtime)
            for operator, taken in row['operators'].items():
                print(f'{taken * 1e3:50.2f} ms {operator}')
    return result


# ---------------------------------------------------------------------- the models and their work

def new_model(block_size, runtime, **changes):
    torch.manual_seed(seed)
    chosen = METHOD | settings(globals()) | changes
    with as_user_error():
        config = ModelConfig(vocab_size=vocab_size, block_size=block_size,
                             **{setting: chosen[setting] for setting in MODEL})
    return Transformer(config).init_weights().to(runtime.device)


class Peer(torch.nn.Module):
    """transformers' Llama of the same sizes, behind the calls of our Transformer."""
    scale_sets = None

    def __init__(self, block_size):
        super().__init__()
        transformers = optional('transformers')
        self.make_cache = transformers.DynamicCache
        self.llama = transformers.LlamaForCausalLM(transformers.LlamaConfig(
            vocab_size=vocab_size, hidden_size=n_embd, intermediate_size=n_hidden,
            num_hidden_layers=n_layer, num_attention_heads=n_head, num_key_value_heads=n_kv_head,
            max_position_embeddings=block_size, rms_norm_eps=1e-5, tie_word_embeddings=False,
            attn_implementation='sdpa'))

    def forward(self, idx, targets=None, last=0, cache=None):
        if targets is not None:
            return self.llama(idx, labels=idx).loss  # it shifts the labels itself
        return self.llama(idx, past_key_values=cache, use_cache=cache is not None,
                          logits_to_keep=last).logits

    def new_cache(self, max_length):
        return self.make_cache(config=self.llama.config)


def both(block_size, runtime):
    """{name: model}: ours, and where a peer is asked for, transformers'."""
    models = {'ours': new_model(block_size, runtime)}
    if peer:
        models['transformers'] = Peer(block_size).to(runtime.device)
    return models


def readers(runtime):
    """both(), frozen, in the precision that a GPU or else float32 reads in; and that precision."""
    kind = runtime.dtype if runtime.device.type == 'cuda' else torch.float32
    models = both(read_context, runtime)
    for model in models.values():
        model.requires_grad_(False).to(kind)
    store_by_column(models['ours'])  # as lib/generate.py does
    return models, kind


def only_scales(model, runtime):
    """The model as tune_scale.py tunes it."""
    for weight, p in cast_matrices(model, runtime.dtype).named_parameters():
        p.requires_grad_(weight.endswith('head_scale'))
    return model


def random_ids(B, T, runtime):
    return torch.randint(vocab_size, (B, T), device=runtime.device)


def training_step(model, B, T, runtime):
    """
    A function that does one step on random tokens as train.py and tune_scale.py do it: loss,
    backward, clipping, optimizer.
    """
    x, y = random_ids(B, T, runtime), random_ids(B, T, runtime)
    weights = [p for p in model.parameters() if p.requires_grad]
    optimizer = torch.optim.AdamW(weights, lr=1e-5, betas=(0.9, 0.95), weight_decay=0.1,
                                  fused=runtime.device.type in ('cpu', 'cuda'))
    forward = compiled(model, runtime, compile)

    def step():
        with runtime.autocast():
            loss = forward(x, y).mean()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(weights, 1.0)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
    return step


def reading_flops(model, T, last):
    """
    FLOP of reading T tokens for the logits of the last few. Of the others the last layer makes keys
    and values only, and attention of a query grows with its place.
    """
    (matmul, attention), unread = model.flops_per_token(T), T - last
    head, block = 2 * model.head.weight.numel(), model.blocks[-1]
    after = block.attn.out.weight.numel() + sum(p.numel() for p in block.mlp.parameters())
    skipped = unread * (2 * after + head) + unread ** 2 / T * attention / n_layer
    return T * (matmul + attention) - skipped


# ---------------------------------------------------------------------- tasks

def train(runtime):
    models, tokens = both(context, runtime), batch_size * context
    works = {who: training_step(model, batch_size, context, runtime)
             for who, model in models.items()}
    flops = 3 * tokens * sum(models['ours'].flops_per_token(context))
    limit = flops / rate(runtime.device, runtime.dtype)
    return measure('training step', works, tokens, limit, runtime)


def steps(model, tuned, B, T, runtime, task, forwards=1):
    """
    A head-scale step beside a whole step. Their limits in the units of a forward pass: products
    with weights once for each forward, once for the gradients that go on to lower layers, and in a
    whole step once for those of weights; attention twice in backward. Returns the figures, and the
    seconds of both parts of the limit.
    """
    works = {'ours': training_step(tuned, B, T, runtime),
             'whole step': training_step(model, B, T, runtime)}
    matmul, attention = model.flops_per_token(T)
    second = B * T / rate(runtime.device, runtime.dtype)  # of a FLOP per token
    linear = {'ours': (forwards + 1) * matmul * second,
              'whole step': (forwards + 2) * matmul * second}
    quadratic = (forwards + 2) * attention * second
    limits = {who: seconds + quadratic for who, seconds in linear.items()}
    result = measure(task, works, B * T, limits, runtime)
    return result, {'linear_seconds': linear, 'quadratic_seconds': quadratic}


def scale(runtime):
    """
    A step of head-scale tuning beside a whole training step, and the ratio by arithmetic, in which
    attention costs 3.5 times its forward pass, as where backward computes the scores again.
    """
    model, tuned = new_model(context, runtime), only_scales(new_model(context, runtime), runtime)
    result, _ = steps(model, tuned, batch_size, context, runtime, 'head-scale step')
    matmul, attention = model.flops_per_token(context)  # 2P and a
    wanted = (2 * matmul + 3.5 * attention) / (3 * matmul + 3.5 * attention)
    ratio = result['ours']['seconds'] / result['whole step']['seconds']
    print(f'{"":24} {ratio:.2f} of the whole step; arithmetic: (4P + 3.5a) / (6P + 3.5a) = '
          f'{wanted:.2f}')
    return result | {'ratio': ratio, 'ratio_by_arithmetic': wanted}


@torch.no_grad()
def sliding_windows(runtime):
    """
    Windows that score their last L/8 tokens: a batch, only those logits; against one by one with
    all logits.
    """
    models, n, scored = both(context, runtime), 16, -(-context // 8)
    windows = random_ids(n, context + 1, runtime)

    def one_by_one(model):
        for window in windows:
            logits = model(window[None, :-1])[0].float()
            F.cross_entropy(logits, window[1:], reduction='none')[-scored:].sum()

    ours = models['ours']
    works = {'ours': lambda: ours(windows[:, :-1], windows[:, -scored:]).double().sum(),
             'one by one': partial(one_by_one, ours)}
    if peer:
        works['transformers'] = partial(one_by_one, models['transformers'])
    limit = n * reading_flops(ours, context, scored) / rate(runtime.device, runtime.dtype)
    with runtime.autocast():
        return measure('sliding windows', works, n * context, limit, runtime)


def entropy(runtime):
    """Entropy of every head of a layer, by the kernel and by the float32 matrix, in place."""
    T, D = read_context, n_embd // n_head
    q = torch.randn(1, n_head, T, D, device=runtime.device)
    k = q[:, :n_kv_head].contiguous()
    later = torch.full((T, T), -1e9, device=runtime.device).triu(1)  # whose exp is 0

    def matrix():
        scores = q @ kernels.repeat_heads(k, n_head).transpose(-1, -2)
        scores.mul_(D ** -0.5).add_(later)
        log_a = scores.sub_(scores.logsumexp(-1, keepdim=True))
        return -log_a.exp().mul_(log_a).sum(-1)

    works = {'ours': partial(kernels.entropy, q, k), 'matrix': matrix}
    flops = 2 * n_embd * T ** 2  # q.k and the sum of keys, half of the square
    limit = flops / rate(runtime.device, torch.float32)
    return measure(f'entropy, T = {T}', works, T, limit, runtime)


def read(model, idx):
    """Prefill. Returns the cache, with room for what will be decoded, and the first new token."""
    cache = new_cache(model, 1, read_context + n_decode)
    logits = model(idx, last=1, cache=cache)
    return cache, logits[:, -1].argmax(-1, keepdim=True)


@torch.no_grad()
def prefill(runtime):
    models, kind = readers(runtime)
    idx, ours = random_ids(1, read_context, runtime), models['ours']
    works = {who: partial(read, model, idx) for who, model in models.items()}
    works['plain pass'] = partial(ours.hidden, idx)
    limit = reading_flops(ours, read_context, 1) / rate(runtime.device, kind)
    return measure(f'prefill, T = {read_context}', works, read_context, limit, runtime)


@torch.no_grad()
def decode(runtime):
    """Tokens one by one, greedy, after read_context; the prompt's pass is not counted."""
    models, kind = readers(runtime)
    idx, ours = random_ids(1, read_context, runtime), models['ours']

    def decoding(model):
        cache, first = read(model, idx)

        def work():
            token = first
            for _ in range(n_decode):
                token = model(token, last=1, cache=cache)[:, -1].argmax(-1, keepdim=True)
            if model is ours:  # back to the end of the prompt
                cache.length -= n_decode
            else:
                cache.crop(-n_decode)
        return work

    works = {who: decoding(model) for who, model in models.items()}
    weights = ours.n_params() - ours.embed.weight.numel()
    keys = 2 * n_layer * n_kv_head * (n_embd // n_head) * (read_context + n_decode / 2)
    x = torch.ones(2 ** 26, device=runtime.device)  # 256 MB, to measure the memory's bandwidth
    bandwidth = 4 * x.numel() / medians({'sum': x.sum}, runtime)['sum']
    limit = n_decode * kind.itemsize * (weights + keys) / bandwidth
    return measure(f'decode, T = {read_context}', works, n_decode, limit, runtime)


# ---------------------------------------------------------------------- tables

class WholeMatrix(methods.Kerple):
    """Kerple with all scores at once, as the code of DAPE V2 computes every method."""

    def attend(self, q, k, v, i, j):
        weights = self.scores(q, k, i, j).softmax(-1, dtype=torch.float32).to(v.dtype)
        return weights @ kernels.repeat_heads(v, q.shape[1])


def step_and_forward(model, runtime):
    """A training step and an uncompiled forward pass on one sequence."""
    x = random_ids(1, context, runtime)

    @torch.no_grad()
    def forward():
        with runtime.autocast():
            model(x, x)  # the loss, of whatever targets
    return training_step(model, 1, context, runtime), forward


def time_cost(runtime):
    """
    Table 7 of DAPE V2: a training step and a forward pass of each method, and their ratios to DAPE
    1x3-Kerple's.
    """
    paper = json.loads((ROOT / 'results/papers/tables.json').read_text())['dape_table7']
    column = {2560: 1, 4096: 2}.get(n_embd, 0)  # by width: 2.7B, 6.7B; beside all others 350M
    whole = paper['rows']['DAPE 1x3-Kerple'][column]
    dape = new_model(context, runtime, position='kerple', dape_kernel=3)
    dape_step, dape_forward = step_and_forward(dape, runtime)
    rows = []
    print(f'a training step on one sequence of {context}, and its ratio to DAPE 1x3-Kerple')
    print(f"{'':24} {'ms':>8} {'ratio':>16} {'in the paper':>14} {'of a forward':>12}")
    for method, (kind, kernel) in TABLE_7.items():  # two models at a time
        model = new_model(context, runtime, position=kind, dape_kernel=kernel)
        if 'whole' in method:
            for block in model.blocks:
                block.attn.position = WholeMatrix(model.config).to(runtime.device)
        step, forward = step_and_forward(model, runtime)
        seconds = medians({'step': step, 'forward': forward, 'DAPE step': dape_step,
                           'DAPE forward': dape_forward}, runtime)
        row = {'method': method, 'seconds': seconds['step'],
               'ratio': seconds['step'] / seconds['DAPE step'], 'paper_ratio': None,
               'forward_seconds': seconds['forward'],
               'forward_ratio': seconds['forward'] / seconds['DAPE forward']}
        if method in paper['rows']:
            row['paper_ratio'] = paper['rows'][method][column] / whole
        rows.append(row)
        print(f"{method:24} {row['seconds'] * 1e3:8.1f} {row['ratio']:16.2f} "
              f"{row['paper_ratio'] or math.nan:14.2f} {row['forward_ratio']:12.2f}")
    return rows


def growth(runtime):
    """
    Time and memory of steps on one sequence of T tokens, of head-scale tuning (ours) and of
    training, activations recomputed: linear and quadratic in T, as the arithmetic of their limits
    says. Memory is beyond weights and optimizer.
    """
    model = new_model(max(contexts), runtime)
    tuned, rows = only_scales(new_model(max(contexts), runtime), runtime), []
    tuned.checkpoint_activations = model.checkpoint_activations = True
    for T in contexts:
        task = f'head-scale step, T = {T}'
        result, parts = steps(model, tuned, 1, T, runtime, task, forwards=2)
        rows.append(result | parts)
    return rows


def memory(runtime):
    """
    Peak memory of a head-scale step on one sequence of T tokens, activations recomputed, beyond the
    weights. One call.
    """
    model, rows = only_scales(new_model(max(contexts), runtime), runtime), []
    model.checkpoint_activations = True
    weights = sum(p.numel() * p.element_size() for p in model.parameters())
    keep_freed_memory(2 ** 25)  # a heap with holes would be too large for a small machine
    print(f'head-scale step of {model.n_params():,} parameters, weights of {weights / 1e9:.2f} GB')
    for T in contexts:
        began = time.perf_counter()
        peak = peak_memory(training_step(model, 1, T, runtime), runtime)
        rows.append({'length': T, 'peak_memory': peak, 'per_token': peak / T, 'weights': weights,
                     'seconds': time.perf_counter() - began})
        print(f'{T:8,d} tokens {peak / 1e9:8.2f} GB {peak / T / 1e3:8.1f} kB a token', flush=True)
    return rows


TASKS = {'train': train, 'scale': scale, 'eval': sliding_windows, 'entropy': entropy,
         'prefill': prefill, 'decode': decode}
TABLES = {'time_cost': time_cost, 'growth': growth, 'memory': memory}


def read_like(given):
    """Take the settings of the model that were not given from the training configs in `like`."""
    values = {}
    for config in like:
        values |= run_config(config)
    if 'n_layer' not in values:
        raise UserError(f'like is {like}, which sets no n_layer: give the config that the model is '
                        'trained with.')
    values = {'position': 'none', 'context': values.get('block_size', context)} | values
    for setting in (*MODEL, 'context'):
        if setting in values and setting not in given:
            globals()[setting] = values[setting]


def check_settings(runtime):
    if not set(tasks) <= set(TASKS):
        raise UserError(f"tasks is {tasks}. Choose from: {', '.join(TASKS)}.")
    if table and table not in TABLES:
        raise UserError(f"table is '{table}'. Choose {', '.join(TABLES)}, or leave it empty.")
    if peer not in ('', 'hf'):
        raise UserError(f"peer is '{peer}'. Choose hf, or leave it empty.")
    if runtime.world_size > 1:
        raise UserError('bench.py measures one device: start it without torchrun.')
    between(globals(), 1, 'context', 'batch_size', 'read_context', 'contexts', 'n_decode', 'rounds')


def main(given=()):
    """given: the names of the settings that the user gave."""
    began, runtime = time.perf_counter(), setup(device, dtype, seed)
    if like:
        read_like(given)
    check_settings(runtime)
    torch._dynamo.config.fail_on_recompile_limit_hit = True  # or it would go on uncompiled
    os.environ.setdefault('KINETO_LOG_LEVEL', '6')  # or each profile announces itself
    ceiling = rate(runtime.device, runtime.dtype)
    print(f'{runtime.device.type}, {torch.get_num_threads()} threads, torch {torch.__version__}, '
          f'{runtime.dtype}: a large matrix product does {ceiling / 1e12:.2f} TFLOP/s')
    if table:
        results = {table: TABLES[table](runtime)}
    else:
        results = {task: TASKS[task](runtime) for task in tasks}
    print(f'graphs compiled after the warm-up: {sum(LATE_GRAPHS)}')
    path = result_path(out_dir, name or table or runtime.device.type) + '.json'
    result = {'stage': 'bench', 'matmul_flops': ceiling, 'late_graphs': sum(LATE_GRAPHS),
              'results': results}
    save_json(path, result | provenance(settings(globals()), runtime, time.perf_counter() - began))
    print(f'wrote {path}')


if __name__ == '__main__':
    main(configure(globals(), methods.Settings))
