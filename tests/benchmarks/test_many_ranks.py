"""benchmarks/many_ranks.py: each part for a few ranks, and the layouts that it checks."""

import pytest
from phalanx.benchmarks import many_ranks
from phalanx.comm import threads

pytestmark = pytest.mark.timeout(300)


def rows(text):
    """Each table's rows of figures, as words."""
    tables = [part for part in text.split("\n\n") if "|" in part]
    return [[line.strip("| ").split(" | ") for line in part.splitlines() if line[:3].strip("| ").isdigit()]
            for part in tables]  # fmt: skip


def test_layouts():
    found = many_ranks.layouts(8)
    assert len(found) == len(set(found)) == 20
    assert many_ranks.Layout(1, 8, 1, 8) in found and all(dp * tp * pp == 8 and ep <= tp for dp, tp, pp, ep in found)
    assert len(many_ranks.layouts(256)) == 165


def test_a_wrong_group_is_seen():
    layout = many_ranks.Layout(2, 2, 1, 1)
    places = threads.run(lambda world: many_ranks.place(world, layout), 4)
    many_ranks.check(layout, places)
    with pytest.raises(AssertionError):
        many_ranks.check(layout, [places[0], *places[:3]])


def test_a_plan_is_there_before_its_step(capsys):
    """However many ranks look at different times: else a device would wait for plans."""
    for ranks in (2, 32):
        late = many_ranks.delays(ranks, 10e-3, 30)
        assert len(late) == 22 and min(late) > 0 and max(late) < 10e-3
    assert many_ranks.main(["--ranks", "2", "4", "--parts", "groups,broadcast"]) == 0
    groups, broadcast = rows(capsys.readouterr().out)
    assert [row[:2] for row in groups] == [["2", "4"], ["4", "10"]] and len(broadcast) == 2


def test_one_scheduler_plans_for_several_replicas():
    """Figures of time are the machine's; what is planned is not."""
    replicas, ranks, sequences, size, largest, *_, busy, tokens = many_ranks.steps(3, 4, 2, 5)
    assert (replicas, ranks, sequences) == (3, 6, 4) and 0 < size <= largest < 4096 and busy > 0 and tokens > 0


@pytest.mark.long
@pytest.mark.filterwarnings("ignore::pytest.PytestUnhandledThreadExceptionWarning")  # a thread ends, not the process
def test_deaths_and_silence_are_noticed(capsys):
    assert many_ranks.main(["--ranks", "3", "--parts", "watchdog", "--idle", "0.5"]) == 0
    ((row,),) = rows(capsys.readouterr().out)
    dead, silent = float(row[7]), float(row[8])
    assert 0 < dead < 30_000 and 2 < silent < 60
