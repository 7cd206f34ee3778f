// The script of lessons/explore.html. model.js computes, in a Web Worker; this file asks and draws.
'use strict';
const data = JSON.parse(document.getElementById('data').textContent);
const {L} = data, {n_layer, n_head} = data.models[0].packed.config;
const MOST = 8 * L, HEADS = n_layer * n_head;
const byId = id => document.getElementById(id);
const say = (id, text) => { byId(id).textContent = text; };
const on = (id, kind, act) => byId(id).addEventListener(kind, act);
const element = (tag, textContent, className = '') =>
  Object.assign(document.createElement(tag), {textContent, className});
const offer = (id, options) =>
  byId(id).append(...options.map(([value, text]) => new Option(text, value)));
const range = n => [...Array(n).keys()];
const mean = values => values.reduce((a, b) => a + b, 0) / values.length;
const tokenizer = new Tokenizer(data.tokenizer);
const worker = new Worker(URL.createObjectURL(
  new Blob([byId('model-code').textContent], {type: 'text/javascript'})));
for (const {packed} of data.models) worker.postMessage({packed});
let number = 0;
const waiting = {}; // {slot: [number, function that takes an answer]}
worker.onmessage = ({data: answer}) => {
  if (answer.number === waiting[answer.slot][0]) waiting[answer.slot][1](answer);
};
worker.onerror = event => say('status', `The model stopped: ${event.message}`);

// Give the worker a job. It ends an older job of the same slot. No job: only end the older one.
function ask(slot, job, asked, take) {
  waiting[slot] = [++number, take];
  worker.postMessage({slot, job, number, capacity: MOST + 3 * L, ...asked});
}

// ---------------------------------------------------------------------- what the page offers
const METHODS = {none: 'NoPE', rope: 'RoPE'};
const TITLES = {own: 'as trained', uniform: 'one scale for all heads, tuned',
                head: 'tuned head scales', mine: 'your own scales'};
const titleOf = method => TITLES[method] ?? `tuned: ${method}`;
// Passwords to hide, each with another word that takes its place.
const KEYS = [['river', 'tiger'], ['window', 'garden'], ['silver', 'castle'], ['yellow', 'coffee'],
              ['winter', 'planet']];
for (const one of data.models)
  one.name = one.position.split(',').map(name => METHODS[name]).join('/')
    + (one.packed.config.short_conv ? ' + convolution' : '');

// [title, text]. The repeated paragraph returns after more than L tokens.
const prose = tokenizer.encode(data.prose, MOST);
const paragraph = tokenizer.decode(prose.slice(0, 3 * L >> 1));
const EXAMPLES = [['The first text (code)', null], ['Prose', tokenizer.decode(prose)],
                  ['A repeated paragraph', Array(6).fill(paragraph).join('\n\n')]];

offer('model', data.models.map(({name}, n) => [n, name]));
offer('preset', [...new Set(data.models.flatMap(({sets}) => Object.keys(sets))), 'mine'].map(
  method => [method, titleOf(method)]));
offer('example', [...EXAMPLES.map(([title], n) => [n, title]), [-1, 'Your own']]);
byId('example').lastChild.disabled = true;
offer('hider', [...data.models.map(({name}, n) => [n, `${name}, as trained`]),
               ['mine', 'your settings']]);
byId('hider').selectedIndex = data.models.length - 1;
offer('distance', [1, 2, 4, 8, 16, 28].map(n => [n * L >> 2, `${n * L >> 2} tokens = ${n / 4}L`]));
byId('heads').style.gridTemplateColumns = `1rem repeat(${n_head}, 1fr)`;
byId('heads').append(element('span', ''), ...range(n_head).map(n => element('span', n)));
for (const layer of range(n_layer))
  byId('heads').append(element('span', layer), ...range(n_head).map(() => element('button', '')));
[1, 2, 3, 4, 6, 8].forEach((n, k, ends) => {
  const slider = Object.assign(element('input', ''), {type: 'range', max: 9, step: .1});
  Object.assign(slider.dataset, {from: k ? ends[k - 1] * L : 0, to: n * L});
  const label = element('label', `at ${n}L `);
  label.append(slider);
  byId('points').append(label);
});
// The link is alive only if the page lies in the project.
if (/\/lessons\/explore\.html$/.test(location.pathname))
  byId('study').href = '../results/past_L/README.md';

// The first screen: [title, losses, settings] of three readings by the first model.
function firstReadings() {
  const {sets, stored: {losses}} = data.models[0], tuned = Object.keys(sets).at(-1);
  const row = (title, method, kind, cut) => [title, losses[kind],
                                             {model: 0, scales: sets[method], cut}];
  const title = titleOf(tuned)[0].toUpperCase() + titleOf(tuned).slice(1);
  return [row('As trained', 'own', 'own', false),
          ...tuned === 'own' ? [] : [row(title, tuned, tuned, false)],
          row(`Looks back only ${L - (L >> 3) + 1} to ${L} tokens`, 'own', 'own cut', true)];
}

function sayFirst(rows) {
  const [{parameters, stored}] = data.models, upTo = mean(rows[0][1].slice(0, L));
  const past = rows.map(([, losses]) => mean(losses.slice(L))), cut = past.at(-1);
  const [trained, tuned] = past, than = loss => loss > cut ? 'worse' : 'better';
  say('point', `This small model (${(parameters / 1e6).toFixed(1)} million parameters, trained on `
    + `${data.dataset === 'code' ? 'Python code' : `data set ${data.dataset}`}) only ever saw `
    + `texts of L = ${L} tokens. Here it reads ${MOST}. The redder a token, the worse it was `
    + `predicted. The text itself is ${cut > upTo ? 'harder' : 'easier'} past token ${L}: even if `
    + `the model may look back only about ${L} tokens, its loss there is ${cut.toFixed(2)} nats; `
    + `up to token ${L} it is ${upTo.toFixed(2)}. If it looks at everything, it is `
    + `${than(trained)}: ${trained.toFixed(2)}.` + (past.length < 3 ? '' : ' With other softmax '
      + `scales, tuned for long texts, it is ${tuned.toFixed(2)}, which is still ${than(tuned)} `
      + `than looking back only ${L} tokens.`) + ' Point at any token.');
  say('best', headName(stored.heads.indexOf(Math.max(...stored.heads))).toLowerCase());
  const sizes = data.models.map(({name, parameters: n}) =>
    `${name}: ${n.toLocaleString('en')} parameters`);
  say('about', `The first text is the beginning of ${data.source} of this project. `
    + `${sizes.join('; ')}. Weights have 8 bits here. One model of each kind and one text: small `
    + 'differences mean nothing. Layers and heads are counted from 0.');
}

// ---------------------------------------------------------------------- state
// Set by fromAddress(). scales: of all heads, before the factor. text: null for the first text.
const state = {};
const model = () => data.models[state.model];
const areEqual = (scales, others) => scales.every((x, n) => Math.abs(x - others[n]) < 1e-4);
const settings = () => ({model: state.model, cut: state.cut,
                         scales: state.scales.map(scale => scale * state.factor)});
const asTrained = m => ({model: m, scales: data.models[m].sets.own, cut: false});

// How these scales came about: as trained ('own'), by a method of tuning, or by sliders ('mine').
function methodOf({model: m, scales}) {
  const {sets} = data.models[m];
  return Object.keys(sets).find(method => areEqual(sets[method], scales)) ?? 'mine';
}

const nameOf = asked => `${data.models[asked.model].name}, ${titleOf(methodOf(asked))}`
  + (asked.cut ? ', looking back only L tokens' : '');

// Everything that can be shared stands in the address.
function toAddress() {
  const parts = new URLSearchParams({m: state.model, x: state.factor, n: state.chosen});
  if (state.cut) parts.set('cut', 1);
  if (!areEqual(state.scales, model().sets.own))
    parts.set('s', state.scales.map(scale => +scale.toFixed(4)).join('_'));
  if (state.text !== null) parts.set('t', state.text);
  try { history.replaceState(null, '', `#${parts}`); return true; } catch { return false; }
}

function fromAddress() {
  const parts = new URLSearchParams(location.hash.slice(1));
  const numberOf = (name, least, most, otherwise) => {
    const value = parts.has(name) ? Number(parts.get(name)) : NaN;
    return value >= least && value <= most ? value : otherwise;
  };
  state.model = Math.floor(numberOf('m', 0, data.models.length - 1, 0));
  const gains = model().stored.heads;
  state.factor = numberOf('x', .4, 3, 1);
  state.chosen = Math.floor(numberOf('n', 0, HEADS - 1, gains.indexOf(Math.max(...gains))));
  state.cut = parts.get('cut') === '1';
  const scales = (parts.get('s') ?? '').split('_').map(Number);
  state.scales = scales.length === HEADS && scales.every(scale => Math.abs(scale) < 100)
    ? scales : model().sets.own; // a tuned scale may be below 0
  state.text = parts.get('t');
}

// ---------------------------------------------------------------------- panels of tokens
function shown(id) {
  if (id === data.tokenizer.eot) return '';
  const text = tokenizer.decode([id]).replace(/\r?\n|\r/g, '⏎').replaceAll('\t', '⇥');
  const bytes = [...tokenizer.bytes[id]].map(byte => byte.charCodeAt(0).toString(16)).join(' ');
  return text.includes('\ufffd') ? `<${bytes}>` : text; // some bytes of a character are no text
}

const percent = p => p < .001 ? `1 in ${Number((1 / p).toPrecision(2)).toLocaleString('en')}`
  : p > .999 ? 'more than 99.9%' : `${(100 * p).toFixed(1)}%`;

// A panel shows ids, colored by their losses. `asked` returns the settings of its reading. The
// panels in `twins` show the same ids. `open` is the one whose token the detail box shows.
let open = null;
class Panel {
  constructor(box, text, asked, twins = []) {
    twins.push(this);
    Object.assign(this, {box, text, asked, twins, ids: [], spans: [], at: 0});
    for (const kind of ['pointerover', 'click'])
      box.addEventListener(kind, ({target: {dataset}}) => dataset.i && this.look(+dataset.i));
    box.addEventListener('focus', () => box.matches(':focus-visible') && this.look(this.at || 1));
    box.addEventListener('keydown', event => this.key(event));
  }

  show(ids) {
    let same = 0;
    while (same < ids.length && ids[same] === this.ids[same]) same++;
    for (const span of this.spans.splice(same)) span.remove();
    this.mark?.remove();
    for (let i = same; i < ids.length; i++) {
      const span = element('span', shown(ids[i]).replaceAll('⏎', '⏎\n'));
      span.dataset.i = i;
      if (i) this.box.append(span);
      this.spans.push(span);
    }
    this.mark = element('span', `trained up to here: L = ${L} tokens`, 'mark');
    if (ids.length > L + 1) this.spans[L + 1].before(this.mark);
    this.ids = ids;
  }

  color(losses) {
    this.spans.slice(1).forEach(({style}, n) => n < losses.length
      ? style.setProperty('--loss', losses[n]) : style.removeProperty('--loss'));
  }

  key(event) {
    const steps = {ArrowRight: 1, ArrowLeft: -1, ArrowDown: 10, ArrowUp: -10, PageDown: 100,
                   PageUp: -100, Home: -1e9, End: 1e9};
    if (!(event.key in steps)) return;
    event.preventDefault();
    this.look(this.at + steps[event.key]);
    this.spans[this.at]?.scrollIntoView({block: 'nearest'});
  }

  // Ask what was expected at token i, and what the chosen head attends to.
  look(i) {
    if (this.ids.length < 2) return open === this && closeDetail();
    open?.clear();
    open = this;
    this.at = Math.min(this.ids.length - 1, Math.max(1, i));
    for (const {spans} of this.twins) spans[this.at].classList.add('now');
    byId('detail').hidden = false;
    const head = state.chosen % n_head, layer = Math.floor(state.chosen / n_head);
    const asked = {...this.asked(), text: this.text, ids: this.ids, i: this.at, head, layer};
    say('said', `Token ${this.at}: reading up to here …`);
    byId('bars').replaceChildren();
    ask('look', 'look', asked, answer => this.tell(answer));
  }

  tell({i, likely, p, attention, from, entropy}) {
    const seen = attention.length;
    byId('said').replaceChildren(`Token ${i}${i > L ? ', past L' : ''}: `,
      element('code', shown(this.ids[i])), ` had a chance of ${percent(p)} (loss `
      + `${(-Math.log(p)).toFixed(2)} nats). ` + (i === 1 ? 'There is nothing before it.'
        : `${headName(state.chosen)} looks at about ${Math.round(Math.exp(entropy))} of ${seen} `
          + `tokens (entropy ${entropy.toFixed(2)} of at most ${Math.log(seen).toFixed(2)}).`
          + (from || attention[0] < .05 ? ''
            : ` The start of the text, which is no token here, gets ${percent(attention[0])}.`)));
    byId('bars').replaceChildren(...likely.flatMap(([id, chance]) => {
      const name = shown(id).replaceAll(' ', '␣') || 'end of text', bar = element('i', '');
      bar.style.width = `${100 * chance}%`;
      return [element('code', name, id === this.ids[i] ? 'right' : ''),
              element('span', percent(chance)), bar];
    }));
    // The line is faint everywhere under a head that looks at everything equally.
    attention.forEach((weight, n) => {
      const share = Math.min(100, 300 * Math.sqrt(weight));
      const color = `color-mix(in srgb, var(--look) ${share}%, transparent)`;
      if (weight > .001) this.spans[from + n].style.boxShadow = `inset 0 -4px ${color}`;
    });
  }

  clear() {
    for (const span of this.twins.flatMap(({spans}) => spans)) {
      span.style.boxShadow = '';
      span.classList.remove('now');
    }
  }
}

function closeDetail() {
  byId('detail').hidden = true;
  ask('look');
  open?.clear();
  open = null;
}
const headName = n => `Layer ${Math.floor(n / n_head)}, head ${n % n_head}`;

const boxes = [], firstPanels = [], firstRows = firstReadings();
for (const [title, losses, asked] of firstRows) {
  const says = `${mean(losses.slice(0, L)).toFixed(2)} nats up to L, `
    + `${mean(losses.slice(L)).toFixed(2)} past L`;
  const figure = element('figure', ''), caption = element('figcaption', '');
  const box = Object.assign(element('div', '', 'tokens'), {tabIndex: 0, role: 'group',
    ariaLabel: `${title}: ${says}. Left and right move through the tokens.`});
  caption.append(element('b', title), element('br', ''), says);
  figure.append(caption, box);
  byId('first').append(figure);
  boxes.push(box);
  const panel = new Panel(box, 'first', () => asked, firstPanels);
  panel.show(data.ids);
  panel.color(losses);
  box.onscroll = () => boxes.forEach(other => { other.scrollTop = box.scrollTop; });
}
for (const {box, mark} of firstPanels) // L is in sight
  box.scrollTop = mark.offsetTop - box.clientHeight / 4;
sayFirst(firstRows);

// ---------------------------------------------------------------------- the reader's text
// Losses of the reader's text: as trained, with the settings, and of the model in the guess.
let before = [], after = [], other = [], ids = [];
let phase = ''; // of the guess: 'guess' while the reader draws, then 'shown'
const mine = new Panel(byId('mine'), 'mine', settings);

// Append to `losses` those of the text. For the first text, some are stored.
function fill(slot, asked, losses) {
  const kind = methodOf(asked) + (asked.cut ? ' cut' : '');
  const stored = state.text === null ? data.models[asked.model].stored.losses[kind] : undefined;
  losses.push(...stored ?? []);
  ask(slot, stored ? undefined : 'read', {...asked, ids, text: 'mine'}, answer => {
    losses.push(...answer.losses ?? []);
    drawCurves();
  });
}

// Read the text with the settings, and as trained. Colors and curves fill in from the left.
function read() {
  ids = state.text === null ? data.ids
    : [data.tokenizer.eot, ...tokenizer.encode(state.text.slice(0, 40 * MOST), MOST)];
  if (measuring && measuring.text !== state.text) stopMeasuring();
  [phase, other] = ['', []];
  ask('guess');
  say('guess-says', '');
  mine.show(ids);
  toAddress();
  fill('before', asTrained(state.model), before = []);
  fill('mine', settings(), after = []);
  drawCurves();
  if (open === mine) mine.look(mine.at);
}

// Averages of two readings are set side by side only when both are complete.
function says() {
  const all = ids.length - 1, isTrained = methodOf(settings()) === 'own' && !state.cut;
  if (!all) return 'No text yet.';
  if (after.length < all) return `Reading: ${after.length} of ${all} tokens so far.`;
  const parts = all > L ? [[0, L], [L]] : [[0]]; // up to L, and past it
  const of = losses => parts.map(part => `${mean(losses.slice(...part)).toFixed(2)} nats`);
  return `${all} tokens: loss ${of(after).join(' up to L, ')} ${all > L ? 'past' : 'up to'} L`
    + (isTrained || before.length < all ? '' : ` (as trained ${of(before).join(', ')})`)
    + (all > L ? '' : `. ${needsMore()}`);
}
const needsMore = () => `Needs more than ${L} tokens to pass L (you have ${ids.length - 1}).`;

// ---------------------------------------------------------------------- the curves
// Means of L / 4 tokens, of fewer if the text is short, and of what is left.
function averages(losses) {
  const width = Math.max(1, Math.min(L >> 2, ids.length >> 3)), found = [];
  for (let n = 0; n < losses.length; n += width) {
    const part = losses.slice(n, n + width);
    found.push([n + part.length / 2, mean(part)]);
  }
  return found;
}

function drawCurves() {
  const seen = phase === 'guess' ? other.slice(0, L) : other;
  const curves = {before: averages(before), after: averages(after), other: averages(seen),
                  guess: guessed()};
  for (const [name, places] of Object.entries(curves)) {
    const corners = places.map(([position, loss]) => `${position / L},${Math.min(loss, 9)}`);
    byId(`curve-${name}`).setAttribute('points', corners.join(' '));
    byId(`key-${name}`).hidden = !corners.length;
  }
  byId('points').hidden = phase !== 'guess';
  say('guess', phase === 'guess' ? 'Now show the curve' : 'Guess another model’s curve');
  mine.color(after);
  Object.assign(byId('status'), {textContent: says(), ariaBusy: after.length < ids.length - 1});
}

// The guess goes through points, which are sliders, and ends where the text ends.
const points = [...byId('points').querySelectorAll('input')];
const guessed = () => phase ? points.filter(({parentNode}) => !parentNode.hidden)
  .map(({dataset, value}) => [Math.min(dataset.to, ids.length - 1), +value]) : [];

function startGuess() {
  if (ids.length - 1 <= L) return say('guess-says', needsMore());
  const m = (state.model || data.models.length) - 1, {name} = data.models[m];
  closeDetail();
  phase = 'guess';
  for (const point of points) {
    point.value = 3;
    point.parentNode.hidden = point.dataset.from >= ids.length - 1;
  }
  say('key-other', `${name}, as trained`);
  say('guess-says', `This is another model, ${name}, as trained, up to L. How will its loss go on? `
    + 'Drag in the chart, or set the points:');
  fill('guess', asTrained(m), other = []);
  return drawCurves();
}

function showCurve() {
  if (other.length < ids.length - 1)
    return say('guess-says', `Read ${other.length} of ${ids.length - 1} tokens so far. Wait.`);
  const off = guessed().slice(1).map(([x, y]) => Math.abs(y - mean(other.slice(x - L / 2, x))));
  say('guess-says', `You were ${mean(off).toFixed(1)} nats off on average.`);
  phase = 'shown';
  return drawCurves();
}

on('guess', 'click', () => phase === 'guess' ? showCurve() : startGuess());
for (const point of points) point.addEventListener('input', drawCurves);
for (const kind of ['pointerdown', 'pointermove'])
  on('chart', kind, event => {
    if (phase !== 'guess' || !event.buttons) return;
    // In the group #curves, coordinates are units of L and nats.
    const toCurves = byId('curves').getScreenCTM().inverse();
    const {x, y} = new DOMPoint(event.clientX, event.clientY).matrixTransform(toCurves);
    const distances = guessed().map(([position]) => Math.abs(position / L - x));
    points[distances.indexOf(Math.min(...distances))].value = y;
    drawCurves();
  });

// ---------------------------------------------------------------------- heads and controls
// What sharpening each head wins, and for which text and settings: first what the page stores.
const measured = data.models.map(({stored}, m) => (
  {...asTrained(m), text: null, part: 'first text', gains: stored.heads}));
const most = Math.max(...measured.flatMap(({gains}) => gains.map(Math.abs)));
const buttons = [...byId('heads').querySelectorAll('button')];
let measuring = null; // what is being measured now

function drawHeads() {
  const ofText = measured.filter(one => one.text === state.text && one.model === state.model);
  const fits = one => one.cut === state.cut && areEqual(one.scales, settings().scales);
  const one = ofText.findLast(fits) ?? ofText.at(-1);
  byId('heads').classList.toggle('old', one !== undefined && !fits(one));
  say('measured', !one ? 'Not measured for this text.'
    : `Measured on: ${one.part}, ${nameOf(one)}.`);
  say('measure', measuring ? `Stop (${measuring.gains.length} of ${HEADS} heads measured)`
    : `Measure (about ${state.cut ? '3 minutes' : '1 minute'})`);
  buttons.forEach((button, n) => {
    const gain = one?.gains[n], isZero = gain === undefined || Math.abs(gain) < .005;
    button.className = isZero ? '' : gain > 0 ? 'wins' : 'loses';
    button.style.setProperty('--share', `${isZero ? 0 : 20 + 80 * Math.abs(gain) / most}%`);
    button.textContent = gain === undefined ? '·' : Math.round(100 * gain) + 0;
    button.setAttribute('aria-pressed', n === state.chosen);
    const wins = gain === undefined ? 'not measured'
      : `sharper ${gain < 0 ? 'raises' : 'lowers'} the loss by ${Math.abs(gain).toFixed(3)} nats`;
    button.setAttribute('aria-label', `${headName(n)}: ${wins}`);
    button.tabIndex = n === state.chosen ? 0 : -1;
  });
}

function choose(n) {
  state.chosen = (n + HEADS) % HEADS;
  toAddress();
  drawControls();
  if (open) open.look(open.at);
}

buttons.forEach((button, n) => button.addEventListener('click', () => choose(n)));
on('heads', 'keydown', event => {
  const {chosen} = state, row = chosen - chosen % n_head;
  const to = {ArrowRight: chosen + 1, ArrowLeft: chosen - 1, ArrowDown: chosen + n_head,
              ArrowUp: chosen - n_head, Home: row, End: row + n_head - 1}[event.key];
  if (to === undefined) return;
  event.preventDefault();
  choose(to);
  buttons[state.chosen].focus();
});
on('measure', 'click', () => measuring ? stopMeasuring() : measureHeads());

// Changed settings do not end a measurement. Its numbers are gray while they do not fit.
function measureHeads() {
  read(); // a changed text may be waiting for its turn
  if (ids.length < 4) return;
  const half = ids.length <= L + 8, first = half ? Math.max(1, ids.length >> 1) : L + 1;
  const part = state.text === null ? 'first text' : `your text${half ? ', its second half' : ''}`;
  measured.push(measuring = {...settings(), text: state.text, part, gains: []});
  ask('heads', 'heads', {...settings(), ids, first, factor: data.sharper}, answer => {
    if (answer.done) return stopMeasuring();
    measuring.gains[answer.head] = answer.gain;
    return drawHeads();
  });
  drawHeads();
}

// Forget a measurement that is not complete.
function stopMeasuring() {
  ask('heads');
  if (measuring.gains.length < HEADS) measured.splice(measured.indexOf(measuring), 1);
  measuring = null;
  drawHeads();
}

function drawControls() {
  const {sets, name} = model(), now = methodOf(settings());
  for (const option of byId('preset').options) {
    const {value} = option, title = titleOf(value);
    option.disabled = !(value in sets) && value !== now;
    option.text = value in sets || value === 'mine' ? title : `${title}: not tuned for ${name}`;
  }
  byId('preset').value = now;
  byId('model').value = state.model;
  byId('cut').checked = state.cut;
  byId('factor').value = state.factor;
  say('factor-says', state.factor.toFixed(2));
  byId('scale').value = state.scales[state.chosen];
  byId('scale').setAttribute('aria-label', `Scale of ${headName(state.chosen).toLowerCase()}`);
  say('scale-says', state.scales[state.chosen].toFixed(2));
  say('head-name', headName(state.chosen));
  byId('text').value = state.text ?? tokenizer.decode(data.ids.slice(1));
  byId('example').value = EXAMPLES.findIndex(([, text]) => text === state.text);
  drawHeads();
}

function changed(milliseconds) {
  say('copied', '');
  drawControls();
  clearTimeout(changed.timer);
  changed.timer = setTimeout(read, milliseconds);
}

// What a control changes in the state.
const CHANGES = {
  model: ({value}) => ({model: +value, factor: 1, scales: data.models[value].sets.own}),
  preset: ({value}) => ({factor: 1, scales: model().sets[value]}),
  cut: ({checked}) => ({cut: checked}),
  factor: ({value}) => ({factor: +value}),
  scale: ({value}) => ({scales: state.scales.with(state.chosen, +value)}),
  text: ({value}) => ({text: value}),
  example: ({value}) => ({text: EXAMPLES[value][1]}),
};
for (const name in CHANGES)
  on(name, 'input', ({target}) => {
    Object.assign(state, CHANGES[name](target));
    changed(name === 'text' ? 250 : 60);
  });
on('close', 'click', closeDetail);
on('copy', 'click', () => !toAddress() ? say('copied', 'This text is too long for a link.')
  : (navigator.clipboard?.writeText(location.href) ?? Promise.reject()).then(
    () => say('copied', 'Copied.'), () => say('copied', 'Copy it from the address bar.')));
addEventListener('keydown', event => { if (event.key === 'Escape') closeDetail(); });

// ---------------------------------------------------------------------- write on, hide a key
let writing = 0; // columns that are not done
on('write', 'click', () => {
  const start = ids.slice(0, Math.max(1, L >> 1)), starts = !writing && ids.length > 1;
  say('write-says', ids.length > 1 ? '' : 'Write a few words first.');
  say('write', starts ? 'Stop' : 'Write on');
  writing = starts ? 2 : 0;
  for (const [name, cut] of [['whole', false], ['cut', true]]) {
    const slot = `write-${name}`, box = byId(`written-${name}`), written = [...start];
    ask(slot);
    if (!starts) continue;
    say(`wrote-${name}`, ` (${nameOf({...settings(), cut: false})})`);
    const parts = ['span', 'span', 'b'].map(tag => element(tag, ''));
    const mark = element('i', `L = ${L} here`, 'mark'), ends = [1, start.length, L + 1, 4 * L];
    box.replaceChildren(...parts.slice(0, 2), mark, parts[2]);
    const draw = () => {
      for (const [n, part] of parts.entries())
        part.textContent = tokenizer.decode(written.slice(ends[n], ends[n + 1]));
      mark.hidden = written.length <= L + 1;
      box.scrollTop = box.scrollHeight;
    };
    draw();
    ask(slot, 'write', {...settings(), cut, ids: start, text: slot, n: 3 * L, temperature: .7,
                        seed: 7}, ({done, id}) => {
      if (!done) written.push(id);
      else if (!--writing) say('write', 'Write on');
      draw();
    });
  }
});

// A text that hides `word` and asks for it again, as if it were `answer`, n tokens.
function question(word, answer) {
  const asks = tokenizer.encode("\npassword = '");
  const said = tokenizer.encode(`${answer}'`).slice(0, -1);
  const between = Math.max(0, byId('distance').value - asks.length - said.length);
  const ids = [data.tokenizer.eot, ...tokenizer.encode(`password = '${word}'\n`),
               ...data.ids.slice(1, 1 + between), ...asks];
  return {ids: [...ids, ...said], n: said.length, text: tokenizer.decode(ids.slice(1))};
}
const showQuestion = () => say('asked', `${question(...KEYS[0]).text}█`);

// To tell copying from guessing, the model reads each text twice: with the password in its first
// line, and with another word there.
on('hide', 'click', async () => {
  const m = byId('hider').value, asked = m === 'mine' ? settings() : asTrained(+m);
  const row = byId('keys').tBodies[0].insertRow(0), losses = [], others = [];
  const cells = [nameOf(asked), byId('distance').value, '…', '…', '…'].map(text =>
    row.appendChild(element('td', text)));
  const lossOf = ({ids, n}, found = []) => new Promise(resolve => {
    ask('key', 'read', {...asked, ids, text: 'key'}, answer => answer.done
      ? resolve(mean(found.slice(-n))) : found.push(...answer.losses));
  });
  byId('hide').disabled = byId('distance').disabled = true;
  for (const [word, another] of KEYS) {
    losses.push(await lossOf(question(word, word)));
    others.push(await lossOf(question(another, word)));
    [losses, others].forEach((found, n) => { cells[n + 2].textContent = mean(found).toFixed(2); });
    cells[4].textContent = `${losses.length} of ${KEYS.length} …`;
  }
  const wins = losses.filter((loss, n) => loss < others[n]).length;
  const isRead = wins === losses.length && mean(others) - mean(losses) >= .1;
  cells[4].textContent = `${isRead ? 'read it' : 'did not'} (${wins} of ${losses.length} lower)`;
  byId('hide').disabled = byId('distance').disabled = false;
});

on('distance', 'input', showQuestion);
showQuestion();
if (location.hash.length > 1) byId('play').scrollIntoView();
const restore = () => { fromAddress(); changed(0); open?.look(open.at); };
addEventListener('hashchange', restore);
restore();
