"""
Decoding, against repeated full forward passes and against probabilities worked out by hand; and sample.py as run.

$ python -m pytest tests/test_generate.py
"""

import pytest
import torch
from conftest import mistake, random_model, stage
from test_corpus import hf_json

import checkpoint
from corpus import get_tokenizer, tokenizer_state
from generate import by_column, complete, generate, sample_token
from huggingface import save_folder
from position import POSITIONS

P = torch.tensor([[0.05, 0.4, 0.1, 0.25, 0.2]])  # probabilities of five tokens; likeliest first: 1, 3, 4, 2, 0


def text(model, prompts, *arguments, seed=0, **settings):
    """The tokens that generate() yields for each prompt, (B, n)."""
    generator = torch.Generator().manual_seed(seed)
    return torch.tensor([list(generate(model, prompt, *arguments, generator=generator, **settings))
                         for prompt in prompts.tolist()])


def prompt(*shape):
    return torch.randint(61, shape, generator=torch.Generator().manual_seed(1))


def frequencies(**settings):
    """How often each of the five tokens is drawn in 20,000 draws."""
    drawn = sample_token(P.log().expand(20_000, 5), generator=torch.Generator().manual_seed(0), **settings)
    return torch.bincount(drawn[:, 0], minlength=5) / 20_000


# ----------------------------------------------------------------------------- one token

def test_temperature_0_takes_the_likeliest():
    logits = torch.randn(8, 50, generator=torch.Generator().manual_seed(0))
    assert torch.equal(sample_token(logits, temperature=0), logits.argmax(-1, keepdim=True))


def test_top_k_1_takes_the_likeliest():
    logits = torch.randn(8, 50, generator=torch.Generator().manual_seed(0))
    assert torch.equal(sample_token(logits, top_k=1), logits.argmax(-1, keepdim=True))


@pytest.mark.parametrize('temperature', [0.5, 1.0, 2.0])
def test_temperature_raises_probabilities_to_its_inverse(temperature):
    expected = P[0] ** (1 / temperature)
    torch.testing.assert_close(frequencies(temperature=temperature), expected / expected.sum(), rtol=0, atol=0.015)


@pytest.mark.parametrize('settings, kept', [
    (dict(top_k=1), [1]), (dict(top_k=2), [1, 3]), (dict(top_k=4), [1, 2, 3, 4]), (dict(top_k=9), [0, 1, 2, 3, 4]),
    # cumulative mass, likeliest first: 0.4, 0.65, 0.85, 0.95, 1
    (dict(top_p=0.01), [1]), (dict(top_p=0.39), [1]), (dict(top_p=0.41), [1, 3]), (dict(top_p=0.64), [1, 3]),
    (dict(top_p=0.66), [1, 3, 4]), (dict(top_p=0.9), [1, 2, 3, 4]), (dict(top_p=0.96), [0, 1, 2, 3, 4]),
    (dict(top_p=1.0), [0, 1, 2, 3, 4]),
    # top-p reads what top-k left: 0.4 / 0.65 = 0.615 and 1
    (dict(top_k=2, top_p=0.6), [1]), (dict(top_k=2, top_p=0.62), [1, 3]), (dict(top_k=3, top_p=0.7), [1, 3]),
    # squared and renormalised: 0.587, 0.817, 0.963 ...
    (dict(temperature=0.5, top_p=0.58), [1]), (dict(temperature=0.5, top_p=0.6), [1, 3]),
], ids=str)
def test_top_k_and_top_p_keep_exactly_the_right_tokens_in_proportion(settings, kept):
    drawn = frequencies(**settings)
    assert drawn.nonzero()[:, 0].tolist() == kept
    expected = torch.zeros(5)
    expected[kept] = P[0, kept] ** (1 / settings.get('temperature', 1.0))
    torch.testing.assert_close(drawn, expected / expected.sum(), rtol=0, atol=0.015)


@pytest.mark.parametrize('k', [1, 2])
def test_top_k_keeps_k_tokens_even_where_logits_are_equal(k):
    logits = torch.tensor([[2.0, 5, 5, 5]]).expand(500, 4)  # of 32,000 bfloat16 logits, the two first tie 1 time in 20
    drawn = sample_token(logits, top_k=k, generator=torch.Generator().manual_seed(0))
    assert len(set(drawn[:, 0].tolist())) == k
    if k == 1:
        assert torch.equal(drawn, sample_token(logits, temperature=0))


@pytest.mark.parametrize('settings', [dict(top_k=0), dict(top_p=0.0), dict(temperature=-1.0)], ids=str)
def test_settings_that_leave_no_token_are_refused(settings):
    with pytest.raises(ValueError, match=next(iter(settings))):
        sample_token(P.log(), **settings)


def test_top_p_judges_each_sequence_by_its_own_probabilities():
    flat, sharp = torch.full((5,), 0.2), torch.tensor([0.01, 0.01, 0.96, 0.01, 0.01])
    logits = torch.stack([flat, sharp]).log().repeat(3000, 1)
    drawn = sample_token(logits, top_p=0.95, generator=torch.Generator().manual_seed(0))
    assert set(drawn[0::2, 0].tolist()) == {0, 1, 2, 3, 4} and set(drawn[1::2, 0].tolist()) == {2}


# ----------------------------------------------------------------------------- many tokens

@pytest.mark.parametrize('position', ['none', 'rope'])
@pytest.mark.parametrize('settings', [dict(), dict(temperature=0.0), dict(temperature=1.0, top_k=1)], ids=str)
def test_greedy_equals_argmax_of_repeated_full_forwards(position, settings):
    model, start = random_model(position=position), prompt(3, 20)
    idx = start
    for _ in range(40):  # past block_size
        idx = torch.cat((idx, model(idx)[:, -1].argmax(-1, keepdim=True)), dim=1)
    assert torch.equal(text(model, start, 40, **settings), idx[:, 20:])


def test_prompt_of_one_token_is_enough():
    model, start = random_model(), prompt(2, 1)
    assert torch.equal(text(model, start, 1), model(start)[:, -1].argmax(-1, keepdim=True))


def test_empty_prompt_is_refused():
    with pytest.raises(ValueError, match='prompt is empty'):
        text(random_model(), prompt(1, 0), 5)


def test_same_generator_seed_gives_the_same_text_and_another_another():
    model, start = random_model(), prompt(2, 5)
    first, second, other = (text(model, start, 30, temperature=1.0, seed=seed) for seed in (7, 7, 8))
    assert torch.equal(first, second) and not torch.equal(first, other)


def test_samples_follow_the_models_probabilities():
    model, start = random_model(), prompt(1, 5)
    expected = model(start)[0, -1].softmax(-1)
    drawn = text(model, start.expand(2000, 5), 1, temperature=1.0)
    torch.testing.assert_close(torch.bincount(drawn[:, 0], minlength=61) / 2000, expected, rtol=0, atol=0.04)


def test_one_sequence_stops_with_its_end_of_text():
    model, start = random_model(), prompt(1, 6)
    greedy = text(model, start, 20)[0].tolist()
    eos = greedy[4]
    first = greedy.index(eos)
    assert text(model, start, 20, eos=eos)[0].tolist() == greedy[:first]


def test_generation_computes_logits_for_the_last_position_only_and_reads_each_token_once():
    model, start, seen = random_model(), prompt(1, 20), []
    model.embed.register_forward_hook(lambda module, inputs, output: seen.append(('read', inputs[0].shape[1])))
    model.head.register_forward_hook(lambda module, inputs, output: seen.append(('logits', output.shape[1])))
    text(model, start, 3)
    assert seen == [('read', 20), ('logits', 1), ('read', 1), ('logits', 1), ('read', 1), ('logits', 1)]


# ----------------------------------------------------------------------------- whole completions, beams, batches

def to_transformers(model, folder):
    """Our model as one of stock transformers, through the export."""
    transformers = pytest.importorskip('transformers')
    save_folder(folder, model, tokenizer_state(get_tokenizer('bytes')), torch.float32)
    return transformers.AutoModelForCausalLM.from_pretrained(folder, attn_implementation='eager').eval()


def by_transformers(theirs, prompt, n, beams, eos):
    idx = torch.tensor([prompt])
    out = theirs.generate(idx, attention_mask=torch.ones_like(idx), max_new_tokens=n, num_beams=beams, do_sample=False,
                          eos_token_id=list(eos) or None, pad_token_id=0)[0, len(prompt):].tolist()
    ends = [i for i, token in enumerate(out) if token in eos]
    return out[:ends[0]] if ends else out


@pytest.mark.parametrize('position', ['none', 'rope'])
@pytest.mark.parametrize('beams', [1, 2, 5])
def test_completions_equal_those_of_transformers(tmp_path, position, beams):
    model = random_model(position=position, vocab_size=257)
    model.head.weight.data *= 4  # so that continuations differ in likelihood
    theirs, generator, n_ended = to_transformers(model, tmp_path / 'hf'), torch.Generator().manual_seed(3), 0
    for eos in ((), (256,), tuple(range(0, 257, 9))):  # never, rarely and soon at an end
        prompts = [torch.randint(257, (n,), generator=generator).tolist() for n in (1, 7, 30, 31)]
        ours = complete(model, prompts, 12, beams, eos)
        assert ours == [by_transformers(theirs, prompt, 12, beams, eos) for prompt in prompts]
        n_ended += sum(len(new) < 12 for new in ours)
    assert n_ended > 0


@pytest.mark.parametrize('beams', [1, 3])
@pytest.mark.parametrize('changes', [{'position': name} for name in POSITIONS]
                         + [{'position': 'rope', 'rope_scaling': 'dynamic_ntk:2'}], ids=str)
def test_a_batch_of_unequal_prompts_completes_as_each_would_alone(changes, beams):
    model, generator = random_model(**changes), torch.Generator().manual_seed(3)
    model.head.weight.data *= 4
    prompts = [torch.randint(61, (n,), generator=generator).tolist() for n in (40, 3, 17, 40)]
    together = complete(model, prompts, 10, beams, eos=(5, 6, 7))
    assert together == [complete(model, [prompt], 10, beams, eos=(5, 6, 7))[0] for prompt in prompts]


def test_completions_end_at_a_stop_and_not_before_their_minimum():
    model, prompt = random_model(), [3, 1, 4, 1, 5]
    free = complete(model, [prompt], 12)[0]
    assert complete(model, [prompt], 12, eos=(free[0],))[0] == []
    later = complete(model, [prompt], 12, eos=(free[0],), min_new_tokens=3)[0]
    assert len(later) >= 3 and free[0] not in later[:3]
    assert len(complete(model, [prompt], 12, beams=3, eos=(free[0],), min_new_tokens=3)[0]) >= 3


def test_storing_matrices_by_column_changes_no_value_and_is_done_once():
    model = random_model()
    before = {name: weight.clone() for name, weight in model.state_dict().items()}
    by_column(model)
    places = {name: weight.data_ptr() for name, weight in model.state_dict().items()}
    by_column(model)
    for name, weight in model.state_dict().items():
        assert weight.equal(before[name]) and weight.data_ptr() == places[name], name
    assert model.head.weight.stride() == (1, model.config.vocab_size)


@pytest.mark.parametrize('beams', [1, 3])
def test_completions_of_no_tokens_are_empty(beams):
    assert complete(random_model(), [[1, 2], [3, 4]], 0, beams=beams) == [[], []]


def test_beam_search_reads_the_prompt_once_and_then_one_token_a_beam(monkeypatch):
    model, read = random_model(), []
    hidden = model.hidden
    monkeypatch.setattr(model, 'hidden', lambda idx, *more: (read.append(tuple(idx.shape)), hidden(idx, *more))[1])
    complete(model, [[1, 2, 3], [4]], 4, beams=3)
    assert read == [(2, 3), (6, 1), (6, 1), (6, 1)]


# ----------------------------------------------------------------------------- sample.py

def test_sample_prints_the_prompt_and_goes_on(tiny_run):
    out, _ = stage('sample', f'--out_dir={tiny_run}', '--prompt=def naïve(', '--max_new_tokens=40', '--n_samples=2',
                   '--seed=3')
    one, two = out.split('\n---\n')
    assert one.startswith('def naïve(') and two.startswith('def naïve(') and one != two
    assert 10 + 10 < len(one) <= 10 + 40  # of 40 bytes; some may be bytes of one character


def test_no_new_tokens_leave_the_prompt(tiny_run):
    assert stage('sample', f'--out_dir={tiny_run}', '--prompt=def f', '--max_new_tokens=0')[0] == 'def f\n'


def test_characters_of_several_bytes_are_printed_whole_and_broken_ones_marked(tmp_path):
    encoding, broken = get_tokenizer('bytes'), '東'.encode()[:2]
    recited = 'Zoë→🙂'.encode() + broken + b'a' + 'ʼn'.encode()[:1]  # broken inside, and at the end
    save_reciter(tmp_path / 'last.pt', encoding, [encoding.eot_token, *recited, encoding.eot_token])
    out, _ = stage('sample', f'--out_dir={tmp_path}', '--temperature=0', '--max_new_tokens=100', '--device=cpu')
    assert out == 'Zoë→🙂�a�\n'


def test_words_of_a_hugging_face_tokenizer_keep_the_spaces_before_them(tmp_path):
    encoding = get_tokenizer(hf_json(tmp_path))
    prompt, recited = encoding.encode_ordinary('a bc'), encoding.encode_ordinary('<s>/')
    save_reciter(tmp_path / 'last.pt', encoding, [prompt[-1], *recited, encoding.eot_token])
    out, _ = stage('sample', f'--out_dir={tmp_path}', '--temperature=0', '--prompt=a bc', '--device=cpu')
    assert out == encoding.decode([*prompt, *recited]) + '\n' and out.startswith('a bc ')


def save_reciter(path, encoding, tokens):
    """
    A checkpoint of a model that recites `tokens`, which follow each other in one way only: attention and MLP are 0,
    the embedding of a token is a one-hot vector, and the output matrix sends it to the token after.
    """
    after = dict(zip(tokens, tokens[1:], strict=False))
    assert len(after) == len(tokens) - 1, 'a token comes twice'
    model = random_model(vocab_size=encoding.n_vocab, n_embd=264)
    for p in model.parameters():
        p.data.zero_() if p.dim() == 2 else p.data.fill_(1)
    for i, (token, following) in enumerate(after.items()):
        model.embed.weight.data[token, i] = 1
        model.head.weight.data[following, i] = 1
    checkpoint.save(path, **checkpoint.model_state(model, tokenizer_state(encoding), step=0, settings={}))


def test_sample_of_a_run_that_does_not_exist_is_one_line(tmp_path):
    assert 'last.pt does not exist' in mistake('sample', f'--out_dir={tmp_path}')
