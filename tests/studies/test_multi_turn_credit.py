"""One step of the credit study, and its table against numbers computed by hand."""

import multi_turn_credit as study


def test_every_arm_runs_and_is_compared_with_the_first(tmp_path):
    arms = list(study.ARMS)
    curves = {arm: study.run(arm, 0, 1, 1e-3, tmp_path) for arm in arms}
    assert all(0 <= value <= 1 for of_run in curves.values() for value in of_run["won"])
    # The first step's games are drawn from the same weights with the same noise.
    assert curves[arms[0]] == curves[arms[1]] == curves[arms[2]]


def test_the_table_takes_the_last_ten_steps_and_differences_seed_by_seed():
    base, *others = study.ARMS
    runs = [{"reward": [9.0] + [r] * 10, "won": [0.0] + [0.5] * 10} for r in (0.25, 0.75)]
    better = [{"reward": [r] * 10, "won": [0.25] * 10} for r in (0.5, 1.0)]
    rows = study.table({base: runs, **dict.fromkeys(others, better)}).splitlines()[2:]
    assert rows[0] == f"| {base} | 0.500 ± 3.176 | 0.500 ± 0.000 |  |"  # 12.706 * 0.5 / 2
    assert rows[1] == f"| {others[0]} | 0.750 ± 3.176 | 0.250 ± 0.000 | 0.250 ± 0.000 |"
