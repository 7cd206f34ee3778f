// The script of lessons/explore.html. model.js computes, in a Web Worker; this file asks and draws.
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
  if (answer.number === waiting[answer.slot][0]) waiting[answer.slot][1](answer);
};
worker.onerror = event => { byId('status').textContent = `The model stopped: ${event.message}`; };

// Give the worker a job. It ends an older job of the same slot. No job: only end the older one.
function ask(slot, job, asked, take) {
  waiting[slot] = [++number, take];
  worker.postMessage({slot, job, number, capacity: MOST + 3 * L, ...asked});
}

// ---------------------------------------------------------------------- state

// scales: of all heads before the factor. text: null stands for the first text.
const state = {model: 0, factor: 1, scales: data.models[0].own, cut: false, text: null, chosen: 0};
const model = () => data.models[state.model];
const scalesNow = () => state.scales.map(scale => scale * state.factor);
const areEqual = (scales, others) => scales.every((x, n) => Math.abs(x - others[n]) < 1e-4);
const settings = () => ({model: state.model, scales: scalesNow(), cut: state.cut});

// Everything that can be shared stands in the address.
function toAddress() {
  const parts = new URLSearchParams({m: state.model, x: state.factor, n: state.chosen});
  if (state.cut) parts.set('cut', 1);
  if (!areEqual(state.scales, model().own))
    parts.set('s', state.scales.map(scale => +scale.toFixed(4)).join('_'));
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
  const gains = model().stored.heads;
  state.factor = number('x', .4, 3, 1);
  state.chosen = Math.floor(number('n', 0, HEADS - 1, gains.indexOf(Math.max(...gains))));
  state.cut = parts.get('cut') === '1';
  const scales = (parts.get('s') ?? '').split('_').map(Number);
  state.scales = scales.length === HEADS && scales.every(scale => scale > 0 && scale < 100)
    ? scales : model().own;
  state.text = parts.get('t');
}

// ---------------------------------------------------------------------- panels of tokens

function shown(id) {
  if (id === data.tokenizer.eot) return '';
  return tokenizer.decode([id]).replace(/\r?\n/g, '⏎').replaceAll('\t', '⇥');
}

const colorOf = loss => `rgba(220, 30, 20, ${Math.min(.9, (Math.max(0, loss - 1) / 8) ** 1.4)})`;

let open = null; // the panel whose token the detail box shows

// A panel shows ids, colored by their losses. `asked` returns the settings of its reading.
class Panel {
  constructor(box, text, asked) {
    Object.assign(this, {box, text, asked, ids: [], spans: [], at: 0});
    for (const kind of ['pointerover', 'click'])
      box.addEventListener(kind, ({target: {dataset}}) => dataset.i && this.look(+dataset.i));
    box.addEventListener('focus', () => {
      if (box.matches(':focus-visible')) this.look(this.at || 1);
    });
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
      if (span) span.style.backgroundColor = colorOf(loss);
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
    open?.clear();
    open = this;
    this.at = Math.min(this.ids.length - 1, Math.max(1, i));
    this.spans[this.at].classList.add('now');
    byId('detail').hidden = false;
    const head = state.chosen % n_head, layer = Math.floor(state.chosen / n_head);
    const asked = {...this.asked(), text: this.text, ids: this.ids, i: this.at, head, layer};
    byId('said').textContent = `Token ${this.at}: reading up to here …`;
    byId('bars').replaceChildren();
    ask('look', 'look', asked, answer => this.tell(answer));
  }

  tell({i, likely, p, attention, from, entropy}) {
    const code = document.createElement('code');
    code.textContent = shown(this.ids[i]);
    byId('said').replaceChildren(
      `Token ${i}${i > L ? ', past L' : ''}: `, code, ` had probability `
      + `${(100 * p).toPrecision(2)}%, loss ${(-Math.log(p)).toFixed(2)} nats. `
      + `${headName(state.chosen)} attends with entropy ${entropy.toFixed(2)} of at most `
      + `${Math.log(attention.length).toFixed(2)}.`);
    byId('bars').replaceChildren(...likely.flatMap(([id, chance]) => {
      const [name, bar, says] = ['code', 'i', 'span'].map(tag => document.createElement(tag));
      name.textContent = shown(id).replaceAll(' ', '␣') || 'end of text';
      if (id === this.ids[i]) name.className = 'right';
      bar.style.width = `${100 * chance}%`;
      says.textContent = `${(100 * chance).toFixed(1)}%`;
      return [name, bar, says];
    }));
    const most = Math.max(...attention);
    attention.forEach((weight, n) => {
      const color = `rgba(0, 110, 220, ${weight / most})`;
      if (weight > .02 * most) this.spans[from + n].style.boxShadow = `inset 0 -4px ${color}`;
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

data.first.forEach(({losses, asked}, n) => {
  const panel = new Panel(byId('first').querySelectorAll('.tokens')[n], 'first', () => asked);
  panel.show(data.ids);
  panel.color(0, losses);
});

// ---------------------------------------------------------------------- the reader's text

const mine = new Panel(byId('mine'), 'mine', settings);
let before = [], after = [], guess = [], guessing = false, ids = [];

// The losses of the first text that are stored for these settings, if any.
function storedLosses({model: m, scales, cut}) {
  if (state.text !== null) return null;
  const {stored, own, tuned} = data.models[m];
  if (areEqual(own, scales)) return cut ? stored.cut : stored.plain;
  const n = cut ? -1 : tuned.findIndex(one => areEqual(one.scales, scales));
  return n < 0 ? null : stored.tuned[n];
}

// Read the text with the settings, then as trained. Colors and curves fill in from the left.
function read() {
  ids = state.text === null ? data.ids
    : [data.tokenizer.eot, ...tokenizer.encode(state.text)].slice(0, MOST + 1);
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
  const readBefore = () => before.length || ask(
    'before', 'read', {...plain, ids, text: 'mine'}, ({losses}) => {
      before.push(...losses ?? []);
      drawChart();
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
  const past = after.slice(L), cutOff = state.text !== null && ids.length > MOST;
  return `${after.length} tokens, loss ${mean(after.slice(0, L)).toFixed(2)} nats up to L`
    + (guessing ? ', hidden past it' : past.length ? `, ${mean(past).toFixed(2)} past it`
      : `; it needs more than ${L} to pass L`)
    + (cutOff ? `. Only the first ${MOST} tokens are read.` : '.');
}

let timer = 0;
function readSoon(milliseconds) {
  clearTimeout(timer);
  timer = setTimeout(read, milliseconds);
}

// ---------------------------------------------------------------------- the curves

// Sizes of the picture, whose axes are in the template.
const WIDTH = 480, HEIGHT = 230, LEFT = 34, TOP = 18, BOTTOM = 36, HIGHEST = 9;
const svg = byId('chart');
const xOf = position => LEFT + position / MOST * (WIDTH - LEFT - 8);
const yOf = loss => HEIGHT - BOTTOM - Math.min(loss, HIGHEST) / HIGHEST * (HEIGHT - TOP - BOTTOM);

// Means of L / 4 tokens, and of what is left, as the path of a curve.
function line(losses) {
  const width = Math.max(1, L >> 2), points = [];
  for (let n = 0; n < losses.length; n += width) {
    const part = losses.slice(n, n + width);
    points.push([n + part.length / 2, mean(part)]);
  }
  return pathOf(points);
}

function pathOf(points) {
  const places = points.map(([position, loss]) => `${xOf(position)} ${yOf(loss)}`);
  return places.length ? `M${places.join('L')}` : '';
}

function drawChart() {
  const seen = losses => guessing ? losses.slice(0, L) : losses;
  byId('curve-before').setAttribute('d', line(seen(before)));
  byId('curve-after').setAttribute('d', line(seen(after)));
  byId('curve-guess').setAttribute('d', pathOf(guess));
  svg.setAttribute('aria-label', `Loss by position. Your settings: ${says()}`);
}

// The guess is a curve through points that one drags in the picture, or moves as sliders.
function startGuess() {
  const last = data.models.length - 1; // the first screen showed the first one
  guessing = true;
  if (!state.model) Object.assign(state, {model: last, factor: 1, scales: data.models[last].own});
  changed();
  guess = [1, 2, 3, 4, 6, 8].map(n => [n * L, 3]);
  byId('points').hidden = false;
  byId('points').replaceChildren(...guess.map(([position], n) => {
    const label = document.createElement('label'), input = document.createElement('input');
    Object.assign(input, {type: 'range', min: 0, max: HIGHEST, step: .1, value: 3});
    input.addEventListener('input', () => { guess[n][1] = +input.value; drawChart(); });
    label.append(`at ${position / L}L`, input);
    return label;
  }));
  byId('guess').textContent = 'Now show the curve';
  byId('guess-says').textContent = `${model().name}: how does it go on? Drag in the picture, or:`;
  drawChart();
}

function endGuess() {
  guessing = false;
  byId('points').hidden = true;
  byId('guess').textContent = 'Draw your guess first';
  byId('status').textContent = says();
  const off = guess.slice(1).filter(([x]) => after.length >= x)
    .map(([x, y]) => Math.abs(y - mean(after.slice(x - L / 2, x))));
  byId('guess-says').textContent = off.length
    ? `You were ${mean(off).toFixed(1)} nats off on average.` : 'The text is too short to tell.';
  drawChart();
}

byId('guess').addEventListener('click', () => guessing ? endGuess() : startGuess());
svg.addEventListener('pointerdown', event => svg.setPointerCapture(event.pointerId));
for (const kind of ['pointerdown', 'pointermove'])
  svg.addEventListener(kind, event => {
    if (!guessing || !event.buttons) return;
    const at = svg.getBoundingClientRect();
    const x = (event.clientX - at.left) / at.width * WIDTH;
    const y = (event.clientY - at.top) / at.height * HEIGHT;
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
  const most = Math.max(.05, ...values.map(Math.abs));
  [...byId('heads').children].forEach((button, n) => {
    const share = (values[n] ?? 0) / most;
    button.style.background = share >= 0
      ? `hsl(207 80% ${96 - 42 * share}%)` : `hsl(5 80% ${96 + 36 * share}%)`;
    button.textContent = values[n] === undefined ? '·' : Math.round(100 * values[n]) + 0;
    button.setAttribute('aria-pressed', n === state.chosen);
    const wins = values[n]?.toFixed(3) ?? 'not measured';
    button.setAttribute('aria-label', `${headName(n)}: sharpening it wins ${wins} nats`);
    button.tabIndex = n === state.chosen ? 0 : -1;
  });
}

function choose(n) {
  state.chosen = (n + HEADS) % HEADS;
  toAddress();
  drawControls();
  if (open) open.look(open.at);
}

[...byId('heads').children].forEach((button, n) => {
  button.addEventListener('click', () => choose(n));
});
byId('heads').addEventListener('keydown', event => {
  const step = {ArrowRight: 1, ArrowLeft: -1, ArrowDown: n_head, ArrowUp: -n_head}[event.key];
  if (!step) return;
  event.preventDefault();
  choose(state.chosen + step);
  byId('heads').children[state.chosen].focus();
});
byId('measure').addEventListener('click', measureHeads);

function measureHeads() {
  if (ids.length < 4) return;
  const first = ids.length > L + 8 ? L + 1 : Math.max(1, ids.length >> 1);
  gains = [];
  const progress = Object.assign(byId('progress'), {hidden: false, max: HEADS, value: 0});
  ask('heads', 'heads', {...settings(), ids, first, factor: data.sharper}, answer => {
    progress.hidden = answer.done ?? false;
    if (!answer.done) gains[answer.head] = answer.gain;
    progress.value = answer.head + 1 || HEADS;
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
                   ...model().tuned.map(one => [one.method, one.title, one.scales])];
  const now = scalesNow();
  const same = presets.find(([, , scales]) => areEqual(scales, now));
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
  const text = state.text ?? tokenizer.decode(data.ids.slice(1));
  if (byId('text').value !== text) byId('text').value = text;
  drawHeads();
}

function changed() {
  forgetGains();
  drawControls();
  readSoon(60);
}

// What a control changes in the state.
const CHANGES = {
  model: ({value}) => ({model: +value, factor: 1, scales: data.models[value].own}),
  preset: ({value}) => ({factor: 1, scales: model().tuned.find(({method}) => method === value)
    ?.scales ?? model().own}),
  cut: ({checked}) => ({cut: checked}),
  factor: ({value}) => ({factor: +value}),
  scale: ({value}) => ({scales: state.scales.with(state.chosen, +value)}),
};
document.querySelector('form').addEventListener('input', ({target}) => {
  Object.assign(state, CHANGES[target.id](target));
  changed();
});
byId('text').addEventListener('input', event => {
  state.text = event.target.value;
  forgetGains();
  drawHeads();
  readSoon(250);
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
    box.innerHTML = '<span class="small"></span><span></span><b></b>';
    const ends = [1, start.length, L, 4 * L];
    const draw = () => [...box.children].forEach((part, n) => {
      part.textContent = tokenizer.decode(written.slice(ends[n], ends[n + 1]));
    });
    draw();
    const text = `write-${name}`, asked = {...settings(), cut, ids: start, text};
    ask(text, 'write', {...asked, n: 3 * L, temperature: .7, seed: 7}, answer => {
      if (answer.done && !--running) byId('write').textContent = 'Write on';
      if (answer.done) return;
      written.push(answer.id);
      draw();
    });
  }
}
// The key is made of tokens of the vocabulary. To tell copying from guessing, the model reads the
// text twice: once with the key in its first line, once with another word there.
function hide() {
  const known = tokenizer.bytes.filter(word => /^[a-z]{4,}$/.test(word));
  const words = known.length > 9 ? known : ['river', 'stone', 'cloud', 'tiger', 'piano'];
  const pick = () => words[Math.floor(Math.random() * words.length)];
  const [key, other] = [1, 2].map(() => `${pick()}_${pick()}_${pick()}`);
  const distance = +byId('distance').value, asks = tokenizer.encode("\nsecret_word = '");
  const answer = tokenizer.encode(`${key}'`).slice(0, -1);
  const filler = data.ids.slice(1, 1 + Math.max(0, distance - asks.length - answer.length));
  const promptOf = word => [data.tokenizer.eot, ...tokenizer.encode(`secret_word = '${word}'\n`),
                            ...filler, ...asks];
  const row = byId('keys').tBodies[0].insertRow(0), preset = byId('preset').selectedOptions[0].text;
  const name = `${model().name}, ${preset}${state.cut ? ', cut to L' : ''}`;
  const cells = [name, distance, key, '…', '…', '…'].map(text => {
    row.insertCell().textContent = text;
    return row.lastChild;
  });
  const asked = {...settings(), text: 'key'}, written = [];
  const showLoss = (n, word, then) => {
    const losses = [];
    ask('key', 'read', {...asked, ids: [...promptOf(word), ...answer]}, found => {
      losses.push(...found.losses ?? []);
      cells[n].textContent = mean(losses.slice(-answer.length)).toFixed(2);
      if (found.done) then();
    });
  };
  byId('hide').disabled = true;
  ask('key', 'write', {...asked, ids: promptOf(key), n: answer.length, temperature: 0}, one => {
    if (!one.done) { written.push(one.id); return; }
    cells[3].textContent = tokenizer.decode(written).replace(/\n/g, '⏎');
    showLoss(4, key, () => showLoss(5, other, () => { byId('hide').disabled = false; }));
  });
}
byId('write').addEventListener('click', write);
byId('hide').addEventListener('click', hide);
fromAddress();
drawControls();
read();
