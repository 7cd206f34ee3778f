// The script of lessons/explore.html. model.js computes, in a Web Worker; this file asks it and draws.
'use strict';
const data = JSON.parse(document.getElementById('data').textContent);
const {L, n_layer, n_head} = data, MOST = 8 * L, HEADS = n_layer * n_head;
const byId = id => document.getElementById(id);
const mean = values => values.reduce((a, b) => a + b, 0) / values.length;
const tokenizer = new Tokenizer(data.tokenizer);

// ---------------------------------------------------------------------- the worker

const worker = new Worker(URL.createObjectURL(
  new Blob([byId('model-code').textContent], {type: 'text/javascript'})));
for (const {packed} of data.models) worker.postMessage({packed});
let number = 0;
const waiting = {}; // {slot: [number, function that takes an answer]}
worker.onmessage = ({data: answer}) => {
  const [wanted, take] = waiting[answer.slot];
  if (answer.number === wanted) take(answer);
};
worker.onerror = event => { byId('status').textContent = `The model stopped: ${event.message}`; };

// Give the worker a job. It ends an older job of the same slot. No job: only end the older one.
function ask(slot, job, asked, take) {
  waiting[slot] = [++number, take];
  worker.postMessage({slot, job, number, capacity: MOST + 3 * L, ...asked});
}

// ---------------------------------------------------------------------- state

// scales: of all heads before the factor. text: null stands for the first text.
const state = {model: 0, factor: 1, scales: [...data.models[0].own], cut: false, text: null, chosen: 0};
const model = () => data.models[state.model];
const scalesNow = () => state.scales.map(scale => scale * state.factor);
const isOwn = scales => scales.every((scale, n) => Math.abs(scale - model().own[n]) < 1e-6);
const settings = () => ({model: state.model, scales: scalesNow(), cut: state.cut});
const titles = {uniform: 'one tuned scale', head: 'tuned head scales'};
const titleOf = tuned => titles[tuned.method] ?? `tuned: ${tuned.method}`;

// Everything that can be shared stands in the address.
function toAddress() {
  const parts = new URLSearchParams({m: state.model, x: state.factor, n: state.chosen});
  if (state.cut) parts.set('cut', 1);
  if (!isOwn(state.scales)) parts.set('s', state.scales.map(scale => +scale.toFixed(3)).join('_'));
  if (state.text !== null) parts.set('t', state.text);
  history.replaceState(null, '', `#${parts}`);
}

function fromAddress() {
  const parts = new URLSearchParams(location.hash.slice(1));
  const number = (name, least, most, otherwise) => {
    const value = parts.has(name) ? Number(parts.get(name)) : NaN;
    return value >= least && value <= most ? value : otherwise;
  };
  state.model = Math.floor(number('m', 0, data.models.length - 1, 0));
  state.factor = number('x', .4, 3, 1);
  state.chosen = Math.floor(number('n', 0, HEADS - 1, bestHead()));
  state.cut = parts.get('cut') === '1';
  const scales = (parts.get('s') ?? '').split('_').map(Number);
  state.scales = scales.length === HEADS && scales.every(scale => scale > 0 && scale < 100)
    ? scales : [...model().own];
  state.text = parts.get('t');
}

function bestHead() {
  const gains = model().stored.heads;
  return gains.indexOf(Math.max(...gains));
}

// ---------------------------------------------------------------------- panels of tokens

function shown(id) {
  if (id === data.tokenizer.eot) return '';
  const text = tokenizer.decode([id]);
  return text.replace(/\r?\n/g, '⏎').replaceAll('\t', '⇥');
}

function colorOf(loss) {
  return `rgba(220, 30, 20, ${Math.min(.85, Math.max(0, loss - .5) / 9).toFixed(3)})`;
}

let open = null; // the panel whose token the detail box shows

// A panel shows ids, colored by their losses. `asked` returns the settings of its reading.
class Panel {
  constructor(box, text, asked) {
    Object.assign(this, {box, text, asked, ids: [], spans: [], at: 0});
    const spanOf = event => event.target.closest('[data-i]');
    box.addEventListener('pointerover', event => spanOf(event) && this.look(+spanOf(event).dataset.i));
    box.addEventListener('click', event => spanOf(event) && this.look(+spanOf(event).dataset.i));
    box.addEventListener('focus', () => box.matches(':focus-visible') && this.look(this.at || 1));
    box.addEventListener('keydown', event => this.key(event));
  }

  show(ids) {
    let same = 0;
    while (same < ids.length && ids[same] === this.ids[same]) same++;
    for (const span of this.spans.splice(same)) span.remove();
    this.mark?.remove();
    for (let i = same; i < ids.length; i++) {
      const span = document.createElement('span');
      span.dataset.i = i;
      span.textContent = shown(ids[i]);
      if (i) this.box.append(span);
      this.spans.push(span);
    }
    this.mark = document.createElement('span');
    this.mark.className = 'mark';
    this.mark.textContent = `trained up to here: L = ${L} tokens`;
    if (ids.length > L + 1) this.spans[L + 1].before(this.mark);
    this.ids = ids;
  }

  color(from, losses) {
    losses.forEach((loss, n) => {
      const span = this.spans[from + n + 1];
      if (!span) return;
      span.style.backgroundColor = colorOf(loss);
    });
  }

  key(event) {
    const steps = {ArrowRight: 1, ArrowLeft: -1, ArrowDown: 10, ArrowUp: -10, PageDown: 100,
                   PageUp: -100, Home: -1e9, End: 1e9};
    if (event.key === 'Escape') closeDetail();
    if (!(event.key in steps)) return;
    event.preventDefault();
    this.look(this.at + steps[event.key]);
    this.spans[this.at]?.scrollIntoView({block: 'nearest'});
  }

  // Ask what was expected at token i, and what the chosen head attends to.
  look(i) {
    if (this.ids.length < 2) return;
    if (open && open !== this) open.clear();
    open = this;
    this.clear();
    this.at = Math.min(this.ids.length - 1, Math.max(1, i));
    this.spans[this.at].classList.add('now');
    byId('detail').hidden = false;
    const asked = {...this.asked(), text: this.text, ids: this.ids.slice(0, this.at + 1), i: this.at,
                   layer: Math.floor(state.chosen / n_head), head: state.chosen % n_head};
    byId('said').textContent = `Token ${this.at}: reading up to here …`;
    byId('bars').replaceChildren();
    ask('look', 'look', asked, answer => this.tell(answer));
  }

  tell({i, likely, p, attention, from, entropy}) {
    const code = document.createElement('code');
    code.textContent = shown(this.ids[i]);
    byId('said').replaceChildren(
      `Token ${i}${i > L ? ', past L' : ''}: `, code, ` had probability ${(100 * p).toPrecision(2)}%, `
      + `loss ${(-Math.log(p)).toFixed(2)} nats. ${headName(state.chosen)} spreads its attention `
      + `with entropy ${entropy.toFixed(2)} of at most ${Math.log(attention.length).toFixed(2)}.`);
    byId('bars').replaceChildren(...likely.flatMap(([id, chance]) => {
      const [name, bar, says] = ['code', 'i', 'span'].map(tag => document.createElement(tag));
      name.textContent = shown(id) || 'end of text';
      if (id === this.ids[i]) name.className = 'right';
      bar.style.width = `${100 * chance}%`;
      says.textContent = `${(100 * chance).toFixed(1)}%`;
      return [name, bar, says];
    }));
    const most = Math.max(...attention);
    attention.forEach((weight, n) => {
      const share = weight / most;
      if (share > .02)
        this.spans[from + n].style.boxShadow = `inset 0 -4px rgba(0, 110, 220, ${share.toFixed(2)})`;
    });
  }

  clear() {
    for (const span of this.spans) {
      span.style.boxShadow = '';
      span.classList.remove('now');
    }
  }
}

function closeDetail() {
  byId('detail').hidden = true;
  open?.clear();
  open = null;
}

const headName = n => `Layer ${Math.floor(n / n_head)}, head ${n % n_head}`;

// ---------------------------------------------------------------------- the first screen

function firstScreen() {
  const first = data.models[0], {stored} = first, tuned = first.tuned.at(-1);
  const plain = {model: 0, scales: first.own, cut: false};
  const rows = [['As trained', stored.plain, plain]];
  if (tuned)
    rows.push([titleOf(tuned).replace('tuned', 'Tuned'), stored.tuned.at(-1),
               {...plain, scales: tuned.scales}]);
  rows.push(['Context cut to the last L tokens', stored.cut, {...plain, cut: true}]);
  const past = rows.map(([, losses]) => mean(losses.slice(L)).toFixed(2));
  byId('point').textContent = `${first.name}, a model trained on texts of ${L} tokens, reads ${MOST}: the `
    + `redder a token, the worse it was predicted. Past L it loses the thread (${past[0]} nats)`
    + (tuned ? `, tuned softmax scales win a part back (${past[1]})` : '')
    + `, and forgetting all but the last ${L} tokens does better (${past.at(-1)}).`;
  for (const [name, losses, asked] of rows) {
    const figure = document.createElement('figure'), box = document.createElement('div');
    figure.innerHTML = '<figcaption></figcaption>';
    const says = `${mean(losses.slice(0, L)).toFixed(2)} nats up to L, `
      + `${mean(losses.slice(L)).toFixed(2)} past it`;
    const title = document.createElement('b');
    title.textContent = name;
    figure.firstChild.append(title, `: ${says}`);
    box.className = 'tokens';
    box.tabIndex = 0;
    box.setAttribute('role', 'group');
    box.setAttribute('aria-label', `${name}: ${says}. Left and right move through the tokens.`);
    figure.append(box);
    byId('first').firstChild.append(figure);
    const panel = new Panel(box, 'first', () => asked);
    panel.show(data.ids);
    panel.color(0, losses);
  }
}

// ---------------------------------------------------------------------- the reader's text

const mine = new Panel(byId('mine'), 'mine', settings);
let before = [], after = [], guess = null, guessing = false, ids = [];

function idsNow() {
  return state.text === null ? data.ids : [data.tokenizer.eot, ...tokenizer.encode(state.text)]
    .slice(0, MOST + 1);
}

// The losses of the first text that are stored for these settings, if any.
function storedLosses({model: m, scales, cut}) {
  if (state.text !== null) return null;
  const {stored, own, tuned} = data.models[m];
  const same = other => other.every((scale, n) => Math.abs(scale - scales[n]) < 1e-4);
  if (same(own)) return cut ? stored.cut : stored.plain;
  const n = cut ? -1 : tuned.findIndex(one => same(one.scales));
  return n < 0 ? null : stored.tuned[n];
}

// Read the text with the settings, then as trained. Colors and curves fill in from the left.
function read() {
  ids = idsNow();
  mine.show(ids);
  toAddress();
  const asked = settings(), plain = {model: state.model, scales: model().own, cut: false};
  const found = storedLosses(asked);
  before = storedLosses(plain) ?? [];
  after = found ?? [];
  byId('status').textContent = found || ids.length < 2 ? says() : 'reading …';
  ask('mine');
  ask('before');
  if (found) mine.color(0, found);
  drawChart();
  if (ids.length < 2) return;
  const readBefore = () => before.length || ask('before', 'read', {...plain, ids, text: 'mine'}, answer => {
    if (answer.losses) { before.push(...answer.losses); drawChart(); }
  });
  if (found) readBefore();
  else
    ask('mine', 'read', {...asked, ids, text: 'mine'}, answer => {
      if (answer.losses) {
        mine.color(answer.from, answer.losses);
        after.push(...answer.losses);
        drawChart();
        byId('status').textContent = `reading: ${after.length} of ${ids.length - 1} tokens`;
      } else {
        byId('status').textContent = says();
        readBefore();
      }
    });
  if (open === mine) mine.look(Math.min(mine.at, ids.length - 1));
}

function says() {
  if (!after.length) return 'No text yet.';
  const past = after.slice(L), all = byId('text').value;
  const cutOff = state.text !== null && ids.length > MOST && tokenizer.encode(all).length > MOST;
  return `${after.length} tokens, loss ${mean(after.slice(0, L)).toFixed(2)} nats up to L`
    + (past.length ? `, ${mean(past).toFixed(2)} past it` : `; it needs more than ${L} to pass L`)
    + (cutOff ? `. Only the first ${MOST} tokens are read.` : '.');
}

let timer = 0;
function readSoon(milliseconds = 250) {
  clearTimeout(timer);
  timer = setTimeout(read, milliseconds);
}

// ---------------------------------------------------------------------- the curves

const WIDTH = 480, HEIGHT = 230, LEFT = 34, TOP = 18, BOTTOM = 36, HIGHEST = 9;
const xOf = position => LEFT + position / MOST * (WIDTH - LEFT - 8);
const yOf = loss => HEIGHT - BOTTOM - Math.min(loss, HIGHEST) / HIGHEST * (HEIGHT - TOP - BOTTOM);

function element(name, attributes, parent, text = '') {
  const made = document.createElementNS('http://www.w3.org/2000/svg', name);
  for (const key in attributes) made.setAttribute(key, attributes[key]);
  made.textContent = text;
  parent.append(made);
  return made;
}

const svg = element('svg', {viewBox: `0 0 ${WIDTH} ${HEIGHT}`, role: 'img'}, byId('chart'));
for (let loss = 0; loss <= HIGHEST; loss += 3) {
  element('path', {class: 'axis', d: `M${LEFT} ${yOf(loss)}H${WIDTH - 8}`}, svg);
  element('text', {x: LEFT - 6, y: yOf(loss) + 4, 'text-anchor': 'end'}, svg, loss);
}
for (const n of [1, 2, 4, 6, 8])
  element('text', {x: xOf(n * L), y: HEIGHT - BOTTOM + 16, 'text-anchor': 'middle'}, svg,
          n === 1 ? 'L' : `${n}L`);
element('path', {class: 'axis', d: `M${xOf(L)} ${TOP}V${HEIGHT - BOTTOM}`, 'stroke-dasharray': '2 3'}, svg);
element('text', {x: LEFT, y: 11}, svg, 'loss in nats');
element('text', {x: WIDTH / 2, y: HEIGHT - 3, 'text-anchor': 'middle'}, svg, 'position in tokens');
const paths = Object.fromEntries(['before', 'after', 'guess'].map(name => [
  name, element('path', {class: `curve ${name}`}, svg)]));

// Means of L / 4 tokens, and of what is left.
function line(losses) {
  const width = Math.max(1, L >> 2), points = [];
  for (let n = 0; n < losses.length; n += width) {
    const part = losses.slice(n, n + width);
    points.push(`${xOf(n + part.length / 2)} ${yOf(mean(part))}`);
  }
  return points.length ? `M${points.join('L')}` : '';
}

function drawChart() {
  paths.before.setAttribute('d', line(guessing ? before.slice(0, L) : before));
  paths.after.setAttribute('d', line(guessing ? after.slice(0, L) : after));
  paths.guess.setAttribute('d', guess ? `M${guess.map(([x, y]) => `${xOf(x)} ${yOf(y)}`).join('L')}` : '');
  svg.setAttribute('aria-label', `Loss by position. Your settings: ${says()}`);
}

// The guess is a curve through points that one drags in the picture, or moves as sliders.
function startGuess() {
  guessing = true;
  const start = mean(after.slice(L >> 1, L)) || 3;
  guess = [1, 2, 3, 4, 6, 8].map(n => [n * L, start]);
  byId('points').hidden = false;
  byId('points').replaceChildren(...guess.map(([position], n) => {
    const label = document.createElement('label'), input = document.createElement('input');
    Object.assign(input, {type: 'range', min: 0, max: HIGHEST, step: .1, value: start});
    input.addEventListener('input', () => { guess[n][1] = +input.value; drawChart(); });
    label.append(`at ${position / L}L`, input);
    return label;
  }));
  byId('guess').textContent = 'Now show the curve';
  byId('guess-says').textContent = 'How does the loss go on past L? Drag in the picture, or move the sliders.';
  drawChart();
}

function endGuess() {
  guessing = false;
  byId('points').hidden = true;
  byId('guess').textContent = 'Draw your guess first';
  const width = L >> 1;
  const off = guess.slice(1).filter(([x]) => after.length >= x)
    .map(([x, y]) => Math.abs(y - mean(after.slice(x - width, x))));
  byId('guess-says').textContent = off.length ? `You were ${mean(off).toFixed(1)} nats off on average.` : '';
  drawChart();
}

byId('guess').addEventListener('click', () => guessing ? endGuess() : startGuess());
svg.addEventListener('pointerdown', event => { svg.setPointerCapture(event.pointerId); });
for (const kind of ['pointerdown', 'pointermove'])
  svg.addEventListener(kind, event => {
    if (!guessing || !event.buttons) return;
    const at = svg.getBoundingClientRect();
    const x = (event.clientX - at.left) / at.width * WIDTH, y = (event.clientY - at.top) / at.height * HEIGHT;
    const distances = guess.map(([position]) => Math.abs(xOf(position) - x));
    const n = distances.indexOf(Math.min(...distances));
    const loss = (HEIGHT - BOTTOM - y) / (HEIGHT - TOP - BOTTOM) * HIGHEST;
    guess[n][1] = Math.min(HIGHEST, Math.max(0, loss));
    byId('points').children[n].querySelector('input').value = guess[n][1];
    drawChart();
  });

// ---------------------------------------------------------------------- heads and controls

let gains = null; // what sharpening each head wins; null: those stored for the first text

function drawHeads() {
  const values = gains ?? model().stored.heads;
  const most = Math.max(.01, ...values.map(Math.abs));
  [...byId('heads').children].forEach((button, n) => {
    const share = (values[n] ?? 0) / most;
    button.style.background = share >= 0
      ? `hsl(207 80% ${96 - 42 * share}%)` : `hsl(5 80% ${96 + 36 * share}%)`;
    button.textContent = values[n] === undefined ? '·' : (100 * values[n]).toFixed(0);
    button.setAttribute('aria-pressed', n === state.chosen);
    button.setAttribute('aria-label', `${headName(n)}: sharpening it wins ${values[n]?.toFixed(3)} nats`);
    button.tabIndex = n === state.chosen ? 0 : -1;
  });
}

function choose(n) {
  state.chosen = (n + HEADS) % HEADS;
  toAddress();
  drawControls();
  if (open) open.look(open.at);
}

function makeHeads() {
  byId('heads').style.gridTemplateColumns = `repeat(${n_head}, 1fr)`;
  byId('heads').append(...Array.from({length: HEADS}, (_, n) => {
    const button = document.createElement('button');
    button.type = 'button';
    button.addEventListener('click', () => choose(n));
    return button;
  }));
  byId('heads').addEventListener('keydown', event => {
    const steps = {ArrowRight: 1, ArrowLeft: -1, ArrowDown: n_head, ArrowUp: -n_head};
    if (!(event.key in steps)) return;
    event.preventDefault();
    choose(state.chosen + steps[event.key]);
    byId('heads').children[state.chosen].focus();
  });
  byId('measure').addEventListener('click', measureHeads);
}

function measureHeads() {
  const first = ids.length > L + 8 ? L + 1 : Math.max(1, ids.length >> 1);
  if (ids.length < 4) return;
  gains = [];
  const progress = byId('progress');
  Object.assign(progress, {hidden: false, max: HEADS, value: 0});
  ask('heads', 'heads', {...settings(), ids, first, factor: data.sharper}, answer => {
    if (answer.done) progress.hidden = true;
    else { gains[answer.head] = answer.gain; progress.value = answer.head + 1; }
    drawHeads();
  });
}

function forgetGains() {
  gains = state.text === null ? null : [];
  byId('progress').hidden = true;
  ask('heads');
}

function drawControls() {
  const presets = [['own', 'as trained', model().own],
                   ...model().tuned.map(one => [one.method, titleOf(one), one.scales])];
  const now = scalesNow();
  const same = presets.find(([, , scales]) => scales.every((scale, n) => Math.abs(scale - now[n]) < 1e-4));
  byId('preset').replaceChildren(...presets.map(([value, name]) => new Option(name, value)),
                                 ...(same ? [] : [new Option('your own', 'mine')]));
  byId('preset').value = same ? same[0] : 'mine';
  byId('model').value = state.model;
  byId('cut').checked = state.cut;
  byId('factor').value = state.factor;
  byId('factor-says').textContent = state.factor.toFixed(2);
  byId('scale').value = state.scales[state.chosen];
  byId('scale-says').textContent = state.scales[state.chosen].toFixed(2);
  byId('head-name').textContent = headName(state.chosen);
  if (state.text === null) byId('text').value = tokenizer.decode(data.ids.slice(1));
  else if (byId('text').value !== state.text) byId('text').value = state.text;
  drawHeads();
}

function changed() {
  forgetGains();
  drawControls();
  readSoon(60);
}

byId('model').append(...data.models.map(({name}, n) => new Option(name, n)));
byId('model').addEventListener('change', event => {
  Object.assign(state, {model: +event.target.value, factor: 1});
  state.scales = [...model().own];
  changed();
});
byId('preset').addEventListener('change', event => {
  const tuned = model().tuned.find(one => one.method === event.target.value);
  Object.assign(state, {factor: 1, scales: [...(tuned?.scales ?? model().own)]});
  changed();
});
byId('cut').addEventListener('change', event => { state.cut = event.target.checked; changed(); });
byId('factor').addEventListener('input', event => { state.factor = +event.target.value; changed(); });
byId('scale').addEventListener('input', event => {
  state.scales[state.chosen] = +event.target.value;
  changed();
});
byId('text').addEventListener('input', event => {
  state.text = event.target.value;
  forgetGains();
  drawHeads();
  readSoon();
});
byId('again').addEventListener('click', () => { state.text = null; changed(); });
document.querySelector('form').addEventListener('submit', event => event.preventDefault());
addEventListener('keydown', event => { if (event.key === 'Escape') closeDetail(); });
addEventListener('hashchange', () => { fromAddress(); changed(); });

// ---------------------------------------------------------------------- write on, hide a key

function write() {
  const start = ids.slice(0, Math.max(1, L >> 1));
  if (byId('write').textContent === 'Stop') {
    for (const name of ['whole', 'cut']) ask(`write-${name}`);
    byId('write').textContent = 'Write on';
    return;
  }
  byId('write').textContent = 'Stop';
  let running = 2;
  for (const [name, cut] of [['whole', false], ['cut', true]]) {
    const box = byId(`written-${name}`), written = [...start];
    const draw = () => {
      const past = document.createElement('b');
      past.style.fontWeight = 'normal';
      past.textContent = tokenizer.decode(written.slice(L));
      const given = document.createElement('span');
      given.className = 'small';
      given.textContent = tokenizer.decode(start.slice(1));
      box.replaceChildren(given, tokenizer.decode(written.slice(start.length, L)),
                          ...(written.length > L ? [past] : []));
    };
    draw();
    ask(`write-${name}`, 'write', {...settings(), cut, ids: start, text: `write-${name}`, n: 3 * L,
                                   temperature: .7, seed: 7}, answer => {
      if (answer.done) { if (!--running) byId('write').textContent = 'Write on'; return; }
      written.push(answer.id);
      draw();
    });
  }
}
byId('write').addEventListener('click', write);

function settingsName() {
  const preset = byId('preset').selectedOptions[0].textContent;
  return `${model().name}, ${preset}${state.cut ? ', cut to L' : ''}`;
}

function hide() {
  const distance = +byId('distance').value;
  const letters = n => 'bcdfgklmnprstvz'[n % 15] + 'aeiou'[n % 5];
  const key = Array.from({length: 4}, () => letters(Math.floor(Math.random() * 1e6))).join('');
  const encode = text => tokenizer.encode(text);
  const given = [data.tokenizer.eot, ...encode(`secret_word = '${key}'\n`)];
  const asks = encode("\nsecret_word = '"), answer = encode(`${key}'`).slice(0, -1);
  const filler = data.ids.slice(1, 1 + Math.max(0, distance - asks.length - answer.length));
  const prompt = [...given, ...filler, ...asks], row = byId('keys').tBodies[0].insertRow(0);
  const cells = [settingsName(), `${distance} tokens`, '', '…', '…'].map(text => {
    const cell = row.insertCell();
    cell.textContent = text;
    return cell;
  });
  cells[2].innerHTML = '<code></code>';
  cells[2].firstChild.textContent = key;
  const asked = {...settings(), text: 'key'}, word = [];
  byId('hide').disabled = true;
  ask('key', 'write', {...asked, ids: prompt, n: answer.length, temperature: 0, seed: 0}, one => {
    if (!one.done) { word.push(one.id); return; }
    const found = tokenizer.decode(word);
    cells[3].textContent = `${found.replace(/\n/g, '⏎')} ${found === key ? '(found)' : '(not the key)'}`;
    const whole = [...prompt, ...answer], losses = [];
    ask('key', 'read', {...asked, ids: whole}, more => {
      if (more.losses) { losses.push(...more.losses); return; }
      cells[4].textContent = `${mean(losses.slice(-answer.length)).toFixed(2)} nats`;
      byId('hide').disabled = false;
    });
  });
}
byId('hide').addEventListener('click', hide);
byId('distance').append(...[.25, .5, 1, 2, 4, 7].map(n => new Option(`${n * L} tokens = ${n}L`, n * L)));

// ---------------------------------------------------------------------- begin

function studies() {
  const say = (row, name) => data.study[row] && `${name} ${data.study[row].slice(1)
    .map(x => `${x < 0 ? 'loses' : 'gains'} ${Math.abs(x).toFixed(2)} nats`)
    .join(' over all tokens and ')} at far repeats (${data.study[row][0]} seed`
    + `${data.study[row][0] > 1 ? 's' : ''})`;
  const rows = [say('none, head', 'NoPE with tuned head scales'),
                say('conv, head', 'NoPE with the convolution and tuned head scales')].filter(Boolean);
  const link = document.createElement('a');
  link.href = '../results/past_L/README.md';
  link.textContent = 'the study';
  byId('study').append('Tuned scales win back a part of what was lost past L. They are to be compared with the '
    + 'same model whose context is cut to the last L tokens. At 8L, compared with that, '
    + `${rows.join('; ')}. A far repeat is a token that only a text more than L tokens back foretells. See `,
    link, '.');
  byId('about').textContent = `The first text is the beginning of ${data.source}, which no model was trained on. `
    + data.models.map(({name, parameters}) => `${name}: ${parameters.toLocaleString('en')} parameters`).join('; ')
    + '. Weights have 8 bits here. One model of each kind and one text: small differences mean nothing. '
    + 'Layers and heads are counted from 0.';
}

fromAddress();
firstScreen();
makeHeads();
studies();
drawControls();
read();
