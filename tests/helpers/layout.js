// Measures every framed copy of a page, and leaves what it found as the document's text.
const shown = (one) => {
  // Text of an SVG has its boxes where a group of it is not drawn, too.
  for (let at = one; at; at = at.parentElement)
    if (at.ownerDocument.defaultView.getComputedStyle(at).display === "none") return false;
  return one.checkVisibility(); // false of what is folded
};
const boxes = (root, make) => {
  const found = [];
  const walk = root.createTreeWalker(root.body, NodeFilter.SHOW_TEXT);
  for (let node; (node = walk.nextNode()); ) {
    if (!node.data.trim() || node.parentElement.closest("style, script")) continue;
    if (!shown(node.parentElement)) continue;
    const range = root.createRange();
    range.selectNodeContents(node);
    for (const box of range.getClientRects()) if (box.width * box.height > 0) found.push(make(box, node));
  }
  return found;
};
const covered = (list) => {
  // Pairs that share more than two pixels each way, and are not the lines of one text.
  list.sort((a, b) => a.top - b.top);
  const wrong = [];
  for (let i = 0; i < list.length; i++)
    for (let j = i + 1; j < list.length && list[j].top < list[i].bottom - 2; j++) {
      const [a, b] = [list[i], list[j]];
      const across = Math.min(a.right, b.right) - Math.max(a.left, b.left);
      const down = Math.min(a.bottom, b.bottom) - Math.max(a.top, b.top);
      if (a.of !== b.of && across > 2 && down > 2) wrong.push(a.text + " | " + b.text);
    }
  return wrong;
};
const plain = (box, of, text) => ({ top: box.top, bottom: box.bottom, left: box.left, right: box.right, of, text });
const labels = (root) => {
  // The labels of every figure, drawn as they are in the page but inline.
  const wrong = [];
  for (const image of root.querySelectorAll("figure img, figure source")) {
    const data = (image.src || image.srcset).split("base64,")[1];
    const bytes = Uint8Array.from(atob(data), (one) => one.charCodeAt(0));
    const holder = root.createElement("div");
    holder.style.width = "800px";
    holder.innerHTML = new TextDecoder().decode(bytes).replace(/^[\s\S]*?(?=<svg)/, "");
    root.body.append(holder);
    const found = [...holder.querySelectorAll('g[id^="text_"]')].map((one) =>
      plain(one.getBoundingClientRect(), one, one.id + " of " + (image.alt || "a narrow figure")));
    wrong.push(...covered(found));
    holder.remove();
  }
  return wrong;
};
const overlaid = (root) => {
  // The drawing of all runs, measure by measure: its labels and how small they are.
  const found = { covered: [], outside: [], sizes: [] };
  for (const radio of root.querySelectorAll(".overlay input[type=radio]")) {
    radio.click();
    const svg = root.querySelector(".overlay > svg");
    const frame = svg.getBoundingClientRect();
    const list = [...svg.querySelectorAll("text")].filter(shown)
      .map((one) => plain(one.getBoundingClientRect(), one, one.textContent));
    const style = (one) => root.defaultView.getComputedStyle(one.of);
    found.sizes.push(...list.map((one) => (parseFloat(style(one).fontSize) * frame.width) / svg.viewBox.baseVal.width));
    found.outside.push(...list.filter((one) => one.left < frame.left || one.right > frame.right
      || one.top < frame.top || one.bottom > frame.bottom).map((one) => one.text));
    found.covered.push(...covered(list));
  }
  return found;
};
const light = (colour) => {
  const [r, g, b] = colour.match(/[\d.]+/g).map((one) => one / 255)
    .map((one) => (one <= 0.04045 ? one / 12.92 : ((one + 0.055) / 1.055) ** 2.4));
  return 0.2126 * r + 0.7152 * g + 0.0722 * b;
};
const contrast = (root, node) => {
  let at = node.parentElement;
  const ink = light(root.defaultView.getComputedStyle(at).color);
  const colour = (one) => root.defaultView.getComputedStyle(one).backgroundColor;
  while (at && /, 0\)$/.test(colour(at))) at = at.parentElement;
  const paper = light(at ? colour(at) : "rgb(255, 255, 255)");
  return (Math.max(ink, paper) + 0.05) / (Math.min(ink, paper) + 0.05);
};
const measure = () => {
  const found = [...document.querySelectorAll("iframe")].map((frame) => {
    const root = frame.contentDocument;
    const page = root.documentElement;
    const text = () => covered(boxes(root, (box, node) => plain(box, node, node.data.trim().slice(0, 40))));
    const folded = text();
    const drawn = labels(root);
    const together = overlaid(root);
    root.querySelectorAll("details").forEach((one) => (one.open = true));
    const clipped = [...root.querySelectorAll(".scroll")].filter((one) => one.scrollWidth > one.clientWidth);
    return {
      page: frame.getAttribute("src"),
      width: page.clientWidth,
      fonts: [...root.fonts].map((one) => one.status),
      scroll: page.scrollWidth,
      clipped: clipped.map((one) => one.getAttribute("aria-label")),
      covered: [...folded, ...text()],
      labels: drawn,
      overlay: together,
      contrast: Math.min(...boxes(root, (box, node) => contrast(root, node))),
      paper: light(getComputedStyle(root.body).backgroundColor),
    };
  });
  document.body.textContent = "found" + JSON.stringify(found) + "end";
};
// A frame is measured once its own fonts are there.
onload = () =>
  Promise.all([...document.querySelectorAll("iframe")].map((frame) => frame.contentDocument.fonts.ready)).then(measure);
