"""
What the programs of studies share. A study measures units, such as a model and a seed, and shows
them over seeds. Each unit is one JSON file, so a stopped study continues where it was. Started
twice, two processes share the units.
"""

import itertools
import statistics
import sys
import time
from pathlib import Path

import demo
from configurator import settings
from demo import read
from lib import figures, plots
from lib.answers import Busy, OnlyWriter, command, save_json
from lib.devices import setup
from lib.errors import UserError, report

# Of readings and tunings. The default, auto, depends on the processor.
PRECISION = '--dtype=float32'


def require_known(names, known):
    """Raise UserError if one of the names is not known."""
    for name in names:
        if name not in known:
            raise UserError(f"'{name}' is not one of {', '.join(known)}.")


def take_table(tables):
    """Let the command line give the name of a table without --table=."""
    for i, argument in enumerate(sys.argv):
        if argument in tables:
            sys.argv[i] = f'--table={argument}'


# ---------------------------------------------------------------------- run stages

def run(command):
    """Run a stage as a user would. If the stage fails, the study ends."""
    demo.run(*command.split())


def made(path, command):
    """The JSON of a stage. Runs the stage first, unless this command has already written it."""
    if not demo.is_made(path, command.split()):
        run(command)
    return read(path)


def evaluated(folder, protocol, label, arguments):
    """What eval_ppl.py measures of the model of a folder."""
    return made(f'{folder}/eval_ppl_{protocol}_{label}.json',
                f'eval_ppl.py --out_dir={folder} --label={label} --protocol={protocol} {arguments}')


def train(folder, arguments):
    """
    Train the model of a folder, or continue its training, unless it has ended. Raises UserError if
    it was trained with other arguments.
    """
    if Path(folder, 'loss.png').exists():  # train.py draws it last
        demo.require_trained_with(folder, arguments.split())
        return
    resume = '--init_from=resume' if Path(folder, 'last.pt').exists() else ''
    run(f'train.py {arguments} --out_dir={folder} {resume}')


def measure_units(units):
    """
    Write the JSON of each unit that has none. units: {path of the JSON: (folder, function)}. Only
    one process at a time works in a folder. Units that another process works on come last. Raises
    UserError if there are no units.
    """
    if not units:
        raise UserError('This study has nothing to measure for these choices. Leave one out, or '
                        'see the lists at the top of its file.')
    made = [path for path in units if path.exists()]
    if made:
        print(f'{len(made)} of {len(units)} results are there already, such as {made[0]}. Remove '
              'the file of a result to measure it again.')
    todo = {path: unit for path, unit in units.items() if not path.exists()}
    while todo:
        for path, (folder, result_of) in list(todo.items()):
            try:
                lock = OnlyWriter(folder)
            except Busy:
                continue
            with lock:
                if not path.exists():
                    print(f'\n{len(todo)} results are left. Next: {path}', flush=True)
                    path.parent.mkdir(parents=True, exist_ok=True)
                    save_json(path, result_of())
            del todo[path]
        time.sleep(5 if todo else 0)


def made_with(result, began):
    """
    The provenance of a unit. result: of one of its stages, whose commit, versions, device and dtype
    are copied. Stages that an earlier start made may have others; the seconds are of this start.
    """
    same = {key: result[key] for key in ('commit', 'versions', 'device', 'dtype')}
    return {'command': command(), **same, 'seconds': round(time.perf_counter() - began, 1)}


# ---------------------------------------------------------------------- show what they found

def over_seeds(values):
    """
    The mean and the standard deviation of one value per seed. A value is a number or a list of
    numbers. One seed has no standard deviation.
    """
    if isinstance(values[0], list):
        columns = [over_seeds(column) for column in zip(*values)]
        return {key: [column[key] for column in columns] for key in ('mean', 'sd')}
    sd = statistics.stdev(values) if len(values) > 1 else None
    return {'mean': statistics.mean(values), 'sd': sd}


def cell_text(value, digits):
    """A text, a number with these digits, or a mean ± its standard deviation. None is empty."""
    if isinstance(value, dict):
        sd = '' if value['sd'] is None else f" ± {value['sd']:.{digits}f}"
        return cell_text(value['mean'], digits) + sd
    if value is None:
        return ''
    return f'{value:.{digits}f}' if isinstance(value, float) else str(value)


def print_table(rows, digits=3):
    """Print rows, {heading: cell}, as a Markdown table."""
    head = dict.fromkeys(itertools.chain(*rows))
    print(f"| {' | '.join(map(str, head))} |\n{'|---' * len(head)}|")
    for row in rows:
        print(f"| {' | '.join(cell_text(row.get(name), digits) for name in head)} |")


def print_lists(cells, names, digits=3):
    """Print {row: lists over seeds, from over_seeds()}. names: what each place of a list is."""
    rows = []
    for row, cell in cells.items():
        columns = zip(names, cell['mean'], cell['sd'])
        rows.append({'': row} | {name: {'mean': mean, 'sd': sd} for name, mean, sd in columns})
    print_table(rows, digits)


def write(path, result, scope, began, draw=None):
    """
    Write PATH.json, and PATH.png by draw(result). scope: the globals() of the study, for its
    settings; began: time.perf_counter() at its start.
    """
    plots.write_result(path, result, settings(scope), setup('cpu', 'float32'), began)
    if draw:
        figures.save(draw(read(f'{path}.json')), f'{path}.png')


def show(path, collect, print_result, scope, draw=None):
    """
    The program of a study with one result. Measures and writes it, or with work=False reads
    PATH.json and draws it again.
    """
    began = time.perf_counter()
    result = collect() if scope['work'] else read(f'{path}.json')
    print_result(result)
    if scope['work']:
        write(path, result, scope, began, draw)
    elif draw:
        figures.save(draw(result), f'{path}.png')


if __name__ == '__main__':  # train a model; see train.sh
    sys.excepthook = report
    if len(sys.argv) < 2 or sys.argv[1].startswith('-') or sys.argv[1].endswith('.py'):
        raise UserError('Name the folder of the run first, then the arguments of train.py.')
    for argument in sys.argv[1:]:
        if ' ' in argument:
            raise UserError(f"'{argument}' has a space. Write it without.")
    train(sys.argv[1], ' '.join(sys.argv[2:]))
