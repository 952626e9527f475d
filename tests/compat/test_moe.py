import threading

import torch
from transformers.integrations import moe

from cb_rollout.compat import moe as moe_compat


def test_the_product_of_experts_is_replaced_in_one_thread_and_only_where_torchs_waits(monkeypatch):
    own, rows, ends = moe._grouped_mm, torch.ones(2, 16), torch.tensor([2], dtype=torch.int32)
    weight, waits, elsewhere = torch.ones(1, 16, 16), [True], []
    monkeypatch.setattr(moe_compat, "waits_for_groups", lambda _: waits[0])

    def products():
        return [
            moe._grouped_mm(rows.double(), weight, ends).sum().item() for waits[0] in (True, False)
        ]

    with moe_compat.replacing_grouped_product(lambda rows, weight, ends: rows.new_zeros(1)):
        assert products() == [0, 512]
        thread = threading.Thread(target=lambda: elsewhere.extend(products()))
        thread.start()
        thread.join()
    assert elsewhere == products() == [512, 512]
    assert moe._grouped_mm is own


def test_a_cpu_waits_for_no_group():
    assert not moe_compat.waits_for_groups(torch.ones(1, 2, 2))
