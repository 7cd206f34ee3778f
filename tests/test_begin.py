"""The study of when reading begins: what a head gives to the token that it should copy."""

import pytest
import torch
from conftest import ROOT, near, random_model, read
from plain import plain_losses, plain_transformer

from results.begin import table


def test_share_and_losses_are_those_of_the_plain_transformer(monkeypatch):
    monkeypatch.setattr(table, 'COPY', 6)
    monkeypatch.setattr(table, 'SEQUENCES', 16)  # two passes
    model = random_model()
    for gap in 0, 5:
        found = table.copying(model, gap)
        ids = torch.randint(model.config.vocab_size, (16, 6 + gap),
                            generator=torch.Generator().manual_seed(0))
        ids = torch.cat((ids, ids[:, :6]), dim=1)
        losses = plain_losses(model, ids)
        near([found['first'], found['second']], [losses[:, :5].mean(), losses[:, -5:].mean()],
             atol=1e-5)
        attention = plain_transformer(model, ids[:, :-1])[1]  # (n_layer, B, H, T, T)
        first = 6 + gap  # the first token of the repetition stands here
        # The token to copy and the next three places, as far as they are not ahead
        shares = [attention[:, :, :, first + n, n + 1:min(n + 5, first + n + 1)].sum(-1)
                  for n in range(5)]
        near(found['share'], torch.stack(shares).mean((0, 2)), atol=1e-6)


def test_stored_rows_are_what_their_files_give():
    stored = read(ROOT / 'results/begin/begin.json')['rows']
    found = [table.row_of(read(ROOT / table.file_of(n, 1337))) for n in table.TOKENS]
    for row, expected in zip(found, stored, strict=True):
        assert row == pytest.approx(expected)
