from test_backends import *
from test_backends import train, compare, figures
for n in ("test_two_ranks_go_as_one","test_eight_ranks_go_as_one","test_no_rank_ever_holds_the_whole_model","test_a_rank_that_dies_ends_the_job"): globals().pop(n)
def test_mup(ranks, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    train(ranks, 1, {"mup-one": MUP, "mup-3d-alone-short": MUON_EIGHT["mup-3d"][2:]}, tmp_path)
    f = figures(tmp_path/"mup-one"); print("norms", max(f["grad_norm"]), min(f["grad_norm"]), f["loss"][0], f["loss"][-1])
    runs = {f"mup-{name}-1": [*more, *MUP, "model.batch_size=2"] for name, more in BOTH.items()}
    train(ranks, 2, runs, tmp_path)
    for name in runs: compare(tmp_path, name, "mup-one")
    train(ranks, 8, {"mup-3d": [*MUON_EIGHT["mup-3d"], f"model.batch_size={2*TP}"]}, tmp_path)
    compare(tmp_path, "mup-3d", "mup-3d-alone-short")
