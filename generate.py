"""
Text from a model over a KV cache: greedy, sampled with temperature, top-k and top-p, or by beam search.
Plain PyTorch; imports nothing of the project.
"""

import math

import torch


def sample_token(logits, temperature=1.0, top_k=None, top_p=None, generator=None):
    """
    Draw the next token. logits: (B, V). Returns (B, 1) ids.
    temperature: 0 takes the likeliest; top_k: only the k likeliest; top_p: only the fewest whose mass reaches p.
    Raises ValueError for a temperature below 0, top_k below 1, or top_p not in (0, 1].
    """
    if temperature < 0 or top_k is not None and top_k < 1 or top_p is not None and not 0 < top_p <= 1:
        raise ValueError(f'temperature {temperature}, top_k {top_k}, top_p {top_p}: temperature must be 0 or more, '
                         'top_k 1 or more, top_p above 0 and at most 1.')
    if temperature == 0:
        return logits.argmax(-1, keepdim=True)
    logits = logits.float() / temperature
    if top_k is not None:
        kept = logits.argsort(descending=True, stable=True)[:, :top_k]  # among equals the first, as argmax
        logits = torch.full_like(logits, float('-inf')).scatter(-1, kept, logits.gather(-1, kept))
    if top_p is not None:
        ordered, order = logits.softmax(-1).sort(descending=True)
        before = ordered.cumsum(-1) - ordered  # mass of the tokens likelier than this one: 0 for the first, so it stays
        logits = logits.masked_fill((before >= top_p).gather(-1, order.argsort(-1)), float('-inf'))
    return torch.multinomial(logits.softmax(-1), 1, generator=generator)


def by_column(model):
    """
    Store float32 matrices on a CPU by column; no value changes. The product with one token is up to 2.5 times as fast
    so, as PyTorch's library goes about it, and that with many tokens as fast as before.
    """
    for module in model.modules():
        if isinstance(module, torch.nn.Linear) and (module.weight.device.type, module.weight.dtype) == (
                'cpu', torch.float32):
            module.weight.data = module.weight.data.t().contiguous().t()


@torch.no_grad()
def generate(model, prompt, max_new_tokens, temperature=0.0, top_k=None, top_p=None, eos=None, generator=None,
             cache_dtype=None):
    """
    Yield the ids that continue a prompt, a list of ids: max_new_tokens of them, or those before `eos`. The prompt is
    read in one pass that computes logits for its last position only. Raises ValueError for an empty prompt.
    """
    if not prompt:
        raise ValueError('the prompt is empty: give at least one token, such as the end-of-text token.')
    by_column(model)
    cache = model.new_cache(1, len(prompt) + max_new_tokens, cache_dtype)
    token = torch.tensor([prompt], device=model.head.weight.device)
    for _ in range(max_new_tokens):
        logits = model(token, last=1, cache=cache)[:, -1]  # (1, V)
        token = sample_token(logits, temperature, top_k, top_p, generator)
        if token.item() == eos:
            return
        yield token.item()


def read_prompts(model, prompts, max_new_tokens, cache_dtype=None):
    """
    Read a batch of prompts, lists of ids of any lengths from 1 on, in one pass: padded on the right, which a causal
    model cannot see. Returns the logits after each prompt, (B, V), and the cache, with room for max_new_tokens more.
    """
    lengths, device = torch.tensor([len(prompt) for prompt in prompts]), model.head.weight.device
    if lengths.min() == 0:
        raise ValueError('a prompt is empty: give at least one token, such as the end-of-text token.')
    padded = torch.zeros(len(prompts), lengths.max(), dtype=torch.long)
    for row, prompt in zip(padded, prompts):
        row[:len(prompt)] = torch.tensor(prompt)
    by_column(model)
    cache = model.new_cache(len(prompts), padded.shape[1] + max_new_tokens, cache_dtype)
    x = model.hidden(padded.to(device), cache)  # (B, T, C)
    if lengths.min() < lengths.max():
        cache.set_prompt_lengths(lengths.to(device))
    return model.head(x[torch.arange(len(prompts)), lengths - 1]), cache


@torch.no_grad()
def complete(model, prompts, max_new_tokens, beams=1, eos=(), min_new_tokens=0, cache_dtype=None):
    """
    Continue each prompt, a list of ids. Returns lists of at most max_new_tokens new ids, the end token left out. A
    batch gives what each prompt alone would. beams: 1 for greedy, or the width of a beam search; eos: ids that end a
    sequence, once it has min_new_tokens.
    """
    if model.length_matters and len({len(prompt) for prompt in prompts}) > 1:
        rest = max_new_tokens, beams, eos, min_new_tokens, cache_dtype
        return [complete(model, [prompt], *rest)[0] for prompt in prompts]
    if beams > 1:
        return beam_search(model, prompts, max_new_tokens, beams, eos, min_new_tokens, cache_dtype)
    logits, cache = read_prompts(model, prompts, max_new_tokens, cache_dtype)
    new, going = [[] for _ in prompts], set(range(len(prompts)))
    for step in range(max_new_tokens):
        if step < min_new_tokens:
            logits[:, list(eos)] = -math.inf
        token = logits.argmax(-1, keepdim=True)
        for b, t in enumerate(token[:, 0].tolist()):
            if t in eos:
                going.discard(b)
            elif b in going:
                new[b].append(t)
        if not going or step + 1 == max_new_tokens:
            break
        logits = model(token, last=1, cache=cache)[:, -1]
    return new


def beam_search(model, prompts, max_new_tokens, beams, eos, min_new_tokens=0, cache_dtype=None):
    """
    The likeliest continuation that a search over `beams` unfinished ones at a time finds, as transformers' default: a
    finished one is judged by its log-probability over its number of tokens, end token included; each step looks at the
    (1 + number of end tokens) * beams likeliest next tokens, of which an end token counts only among the first `beams`;
    and a prompt is done when its best unfinished continuation, judged so, is no better than the worst of `beams`
    finished ones.
    """
    logits, cache = read_prompts(model, prompts, max_new_tokens, cache_dtype)
    if max_new_tokens == 0:
        return [[] for _ in prompts]
    cache.repeat(beams)
    start, B, V = cache.length, len(prompts), logits.shape[-1]
    logits = logits.repeat_interleave(beams, dim=0)                       # (B * beams, V)
    scores = logits.new_full((B, beams), -1e9, dtype=torch.float32)
    scores[:, 0] = 0                                                      # at first the beams of a prompt are the same
    running, finished, done = [[[]] * beams for _ in prompts], [[] for _ in prompts], [False] * B
    for step in range(max_new_tokens):
        log_p = logits.float().log_softmax(-1)
        if step < min_new_tokens:
            log_p[:, list(eos)] = -math.inf
        total = (scores[:, :, None] + log_p.view(B, beams, V)).flatten(1)
        best, index = total.topk(max(2, 1 + len(eos)) * beams)            # (B, candidates)
        source, tokens = [], []
        for b in range(B):
            going = []                                                    # (score, beam, token)
            for rank, (score, i) in enumerate(zip(best[b].tolist(), index[b].tolist())):
                beam, token = divmod(i, V)
                ends = token in eos or step + 1 == max_new_tokens
                if ends and rank < beams and not done[b]:
                    text = running[b][beam] + [token] * (token not in eos)
                    finished[b].append((score / (step + 1), text))
                elif not ends and len(going) < beams:
                    going.append((score, beam, token))
            finished[b] = sorted(finished[b], key=lambda one: -one[0])[:beams]
            if going:
                full = len(finished[b]) == beams
                done[b] |= full and going[0][0] / (step + 1) <= finished[b][-1][0]
                running[b] = [running[b][beam] + [token] for _, beam, token in going]
                scores[b] = torch.tensor([score for score, _, _ in going])
                source += [b * beams + beam for _, beam, _ in going]
                tokens += [token for _, _, token in going]
        if all(done) or step + 1 == max_new_tokens:
            break
        cache.reorder(torch.tensor(source, device=logits.device), start)
        logits = model(torch.tensor(tokens, device=logits.device)[:, None], last=1, cache=cache)[:, -1]
    return [one[0][1] for one in finished]
