"""How a page looks: light and dark, from a telephone to a wide screen."""

INK, PAPER = "#e6e7e8", "#15171a"  # where it is dark
# What is black or white in a figure changes there, and nothing else: colours keep their meaning.
DARK_FIGURE = f"""@media (prefers-color-scheme: dark) {{ svg {{ fill: {INK}; }}
[style*="stroke: #000000"] {{ stroke: {INK} !important; }}
[style*="fill: #000000"] {{ fill: {INK} !important; }}
[style*="stroke: #ffffff"] {{ stroke: {PAPER} !important; }}
[style*="fill: #ffffff"] {{ fill: {PAPER} !important; }} }}
"""
_PAPERS = f"""
:root {{ color-scheme: light dark; --ink: #1b1d20; --paper: #fff; --line: #d5d7da; --soft: #f5f5f2;
  --good: #00664b; --bad: #a33c00; --open: #6b4e00; --quiet: #55595e; }}
@media (prefers-color-scheme: dark) {{ :root {{ --ink: {INK}; --paper: {PAPER}; --line: #3d4248;
  --soft: #1f2226; --good: #4fd1a5; --bad: #ff9a5c; --open: #e3bd5a; --quiet: #a8adb4; }} }}
"""
STYLE = (
    _PAPERS
    + """* { box-sizing: border-box; }
html { -webkit-text-size-adjust: 100%; }
body { margin: 0 auto; max-width: 88rem; padding: 1rem clamp(.9rem, 3vw, 3rem) 4rem;
  background: var(--paper); color: var(--ink); font: 1rem/1.5 system-ui, sans-serif;
  overflow-wrap: anywhere; }
h1 { font-size: 1.7rem; line-height: 1.2; margin: .5rem 0 1rem; }
h2 { font-size: 1.35rem; margin: 3rem 0 .8rem; border-top: 1px solid var(--line);
  padding-top: 1.2rem; }
h3 { font-size: 1.1rem; margin: 2.2rem 0 .5rem; }
p, ul, .told { margin: .5rem 0; max-width: 48rem; }
.told div { margin: .4rem 0; } .told .item { padding-left: 1.2rem; text-indent: -1.2rem; }
.told pre { overflow-x: auto; font-size: .85rem; margin: .4rem 0; }
a { color: inherit; }
.answer { border: 1px solid var(--line); border-radius: 8px; background: var(--soft);
  padding: 1.1rem clamp(.9rem, 2vw, 1.6rem); display: grid; gap: 1rem 2rem; }
.answer figure { margin: 0; } .answer > div { min-width: 0; }
@media (min-width: 1000px) { .answer { grid-template-columns: minmax(17rem, 1fr) 2fr; } }
.verdict { font-size: 1.25rem; line-height: 1.35; font-weight: 600; margin: 0 0 .8rem; }
.tally { display: flex; flex-wrap: wrap; gap: .4rem 1.1rem; padding: 0; list-style: none; }
.about { display: grid; grid-template-columns: auto 1fr; gap: .15rem .9rem; margin: .8rem 0 0;
  font-size: .93rem; }
.about dt { color: var(--quiet); } .about dd { margin: 0; }
.yes { color: var(--good); } .no { color: var(--bad); } .open { color: var(--open); }
.unknown { color: var(--quiet); }
.mark { font-weight: 600; white-space: nowrap; }
.claims { max-width: 82rem; border-top: 1px solid var(--line); }
.claims details { border-bottom: 1px solid var(--line); }
.claims summary, .claims .head { padding: .45rem 0; display: grid; gap: 0 1rem;
  grid-template-columns: 15.5rem 1fr 6rem 10.5rem 7rem; list-style: none; }
.claims summary { cursor: pointer; }
.claims .head { color: var(--quiet); font-size: .88rem; font-weight: 600; padding: .2rem 0; }
.claims .head span:nth-child(n+3) { text-align: right; }
.claims .mark::before { content: "▸ "; color: var(--quiet); }
.claims details[open] .mark::before { content: "▾ "; }
.claims .brief { text-align: right; font-variant-numeric: tabular-nums; font-size: .94rem;
  overflow-wrap: normal; }
.claims .brief:nth-child(n+4) { color: var(--quiet); }
.claims summary::-webkit-details-marker { display: none; }
.claims summary:hover { background: var(--soft); }
.claims small { display: block; color: var(--quiet); font-size: .9rem; }
.claims .about { margin: 0 0 .9rem 16.5rem; }
code, .command { font: .88rem/1.45 ui-monospace, monospace; }
.command { display: block; background: var(--soft); border: 1px solid var(--line);
  border-radius: 6px; padding: .6rem .8rem; white-space: pre-wrap; user-select: all;
  max-width: 62rem; }
.scroll { overflow-x: auto; margin: .6rem 0; width: fit-content; max-width: 100%; }
table { border-collapse: collapse; font-variant-numeric: tabular-nums; font-size: .94rem; }
th, td { text-align: left; vertical-align: top; padding: .3rem .75rem .3rem 0;
  border-bottom: 1px solid var(--line); overflow-wrap: normal; }
th { color: var(--quiet); font-weight: 600; font-size: .88rem; vertical-align: bottom; }
.numbers th:not(:first-child), .numbers td:not(:first-child) { text-align: right;
  padding: .3rem 0 .3rem .75rem; white-space: nowrap; }
.numbers thead th:not(:first-child) { white-space: normal; }
.numbers .reach { color: var(--quiet); font-size: .88rem; padding-left: .45rem !important; }
.numbers th:first-child, .numbers td:first-child { position: sticky; left: 0; z-index: 1;
  background: var(--paper); padding-right: .75rem; white-space: nowrap; }
.numbers .sub td:first-child { padding-left: 1rem; }
.numbers .group td { font-weight: 600; border-bottom: 0; padding-top: .7rem; }
.facts td:first-child { color: var(--quiet); white-space: nowrap; }
.beside { color: var(--quiet); font-size: .88rem; }
figure { margin: 1.2rem 0; max-width: 62rem; }
figure img { display: block; width: 100%; height: auto; background: var(--paper); padding: .4rem;
  border-radius: 4px; }
figcaption { color: var(--quiet); font-size: .93rem; max-width: 48rem; margin-top: .4rem; }
.answer figcaption { font-size: .88rem; }
.overlay fieldset { border: 0; padding: 0; margin: .6rem 0; min-width: 0; }
.overlay legend { color: var(--quiet); font-size: .88rem; padding: 0; }
.overlay label { display: inline-flex; gap: .45rem; align-items: baseline; margin: 0 1rem .2rem 0; }
.overlay .of { display: grid; grid-template-columns: repeat(auto-fill, minmax(19rem, 1fr)); }
.overlay .of svg { width: 28px; flex: none; height: 8px; }
.overlay small { color: var(--quiet); }
.overlay > svg { display: block; width: 100%; max-width: 46rem; height: auto; }
.overlay path { fill: none; stroke-width: 1.8; }
.overlay .axis { stroke: var(--quiet); stroke-width: 1; }
.overlay .grid { stroke: var(--line); stroke-width: .7; }
.overlay text { fill: currentColor; font-size: 12px; }
dl.glossary { max-width: 52rem; } .glossary dt { font-weight: 600; }
.glossary dd { margin: 0 0 .5rem; color: var(--quiet); }
details.more > summary { cursor: pointer; margin: 1rem 0 .3rem; }
@media (max-width: 1000px) {
  .claims .head { display: none; }
  .claims summary { grid-template-columns: auto auto 1fr; }
  .claims summary > :not(.brief) { grid-column: 1 / -1; } .claims .brief { text-align: left; }
  .claims .brief:empty { display: none; }
  .claims .brief::before { content: attr(data-name) " "; color: var(--quiet); }
  .claims .about { margin-left: 1rem; }
}
@media (max-width: 700px) {
  .overlay text { font-size: 16px; } .overlay .of { grid-template-columns: 1fr; }
  .numbers th:first-child, .numbers td:first-child { white-space: normal; min-width: 6.5rem;
    max-width: 45vw; }
  .claims .about { grid-template-columns: 1fr; } .claims dt { margin-top: .4rem; }
  .facts td:first-child { white-space: normal; }
}
@media print { figure, tr, details { break-inside: avoid; } }
"""
)
