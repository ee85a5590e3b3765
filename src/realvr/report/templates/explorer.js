// Cases: everything was computed beforehand; what is chosen here is only looked up. Without this script the page shows
// every case with both pictures, walks and answers.
(function () {
  const WIDTH = 600, ROOMY = 60;
  const KEYS = [
    ["← →", "previous and next case (also p n)"], ["↑ ↓", "previous and next latent, with the focus in the browser (also j k)"],
    ["1 … 9", "a latent"], ["0", "the answer"], ["o", "what lies over the picture"], ["l L", "next and previous layer"],
    ["w", "whole walk over a map"], ["e", "other picture"], ["v", "evidence"], ["f", "filters"], ["x", "clear filters"], ["r", "reset"], ["?", "this list"],
  ];
  const CORNERS = [[-1, -1], [1, -1], [1, 1], [-1, 1]];

  const make = caseBrowser.make;

  function escaped(text) {
    return String(text).replace(/[&<>"']/g, function (sign) { return "&#" + sign.charCodeAt(0) + ";"; });
  }
  function clamp(value, low, high) {
    return Math.min(Math.max(value, low), high);
  }
  function fixed(value, digits) {
    const scale = Math.pow(10, digits || 1);
    return (Math.floor(value * scale + 0.5) / scale).toFixed(digits || 1);
  }
  function signed(cosine) {
    return fixed(cosine, 2).replace("-", "−");
  }
  function heightOf(size) {
    return Math.max(1, Math.round(WIDTH * size[1] / size[0]));
  }
  function placeOf(cell, grid) {
    return "at row " + (Math.floor(cell / grid[1]) + 1) + ", column " + (cell % grid[1] + 1);
  }
  function named(one) {
    return one.first === one.last ? "z" + one.first : "z" + one.first + " to z" + one.last;
  }

  // -------------------------------------------------------------------- the walk, as explorer.py draws it

  function stopsOf(cells, cosine, kinds) {
    const found = [];
    cells.forEach(function (cell, index) {
      const last = found[found.length - 1];
      if (last && last.cell === cell && last.kind === kinds[index]) {
        last.last = index + 1;
        last.cosine = Math.min(last.cosine, cosine[index]);
      } else {
        found.push({ cell: cell, first: index + 1, last: index + 1, cosine: cosine[index], kind: kinds[index] });
      }
    });
    return found;
  }
  // `start`: cells of the pictures before this one; stops in other pictures are left out.
  function walkMarks(cells, cosine, kinds, grid, size, start) {
    const wide = WIDTH / grid[1], high = heightOf(size) / grid[0], unit = Math.min(wide, high);
    const badge = clamp(unit * 0.17, 11, 17), visits = {}, found = stopsOf(cells, cosine, kinds);
    let legs = "", marks = "", before = null;
    found.forEach(function (one, number) {
      one.cell -= start || 0;
      if (one.cell < 0 || one.cell >= grid[0] * grid[1]) {
        before = null;
        return;
      }
      const x = (one.cell % grid[1] + 0.5) * wide, y = (Math.floor(one.cell / grid[1]) + 0.5) * high;
      const opacity = fixed(0.3 + 0.7 * Math.pow(Math.max(0, one.cosine), 2), 2);
      const kind = one.kind === "put" ? "after" : one.kind;
      if (before !== null) {
        const line = "M" + fixed(before[0]) + " " + fixed(before[1]) + "L" + fixed(x) + " " + fixed(y);
        const style = 'style="--step:' + one.first + '"';
        legs += '<path class="halo" d="' + line + '" ' + style + "></path>";
        legs += '<path class="leg ' + kind + '" d="' + line + '" opacity="' + opacity + '" ' + style + "></path>";
      }
      before = [x, y];
      const visit = visits[one.cell] || 0;
      visits[one.cell] = visit + 1;
      marks += stopMark(one, x, y, wide, high, badge, visit, number === found.length - 1, opacity, grid);
    });
    return legs + marks;
  }
  function stopMark(one, x, y, wide, high, badge, visit, last, opacity, grid) {
    const unit = Math.min(wide, high), roomy = unit >= ROOMY, corner = CORNERS[visit % 4];
    const label = one.first === one.last ? String(one.first) : one.first + "–" + one.last;
    const across = 2 * badge + (label.length - 1) * badge * 0.85;
    const bx = clamp(x + (roomy ? corner[0] * 0.3 * wide : 0), across / 2, WIDTH - across / 2);
    const by = clamp(y + (roomy ? corner[1] * 0.3 * high : 0), badge, high * grid[0] - badge);
    const round = one.kind === "donor" ? 3 : badge;
    let parts = "";
    if (one.kind === "put") {
      parts += '<rect class="frame" x="' + fixed(x - wide / 2 + 3) + '" y="' + fixed(y - high / 2 + 3) + '" width="' + fixed(wide - 6) + '" height="' + fixed(high - 6) + '" rx="6"></rect>';
    }
    if (last) parts += '<circle class="ring" cx="' + fixed(x) + '" cy="' + fixed(y) + '" r="' + fixed(0.44 * unit) + '"></circle>';
    if (roomy) parts += '<circle class="dot" cx="' + fixed(x) + '" cy="' + fixed(y) + '" r="' + fixed(0.35 * badge) + '"></circle>';
    parts += '<rect class="badge" x="' + fixed(bx - across / 2) + '" y="' + fixed(by - badge) + '" width="' + fixed(across) + '" height="' + fixed(2 * badge) + '" rx="' + fixed(round) + '"></rect>';
    parts += '<text x="' + fixed(bx) + '" y="' + fixed(by) + '" style="font-size: ' + fixed(1.25 * badge) + 'px;">' + label + "</text>";
    const spoken = escaped(named(one) + " " + placeOf(one.cell, grid) + ", cosine " + signed(one.cosine));
    return '<g class="stop ' + one.kind + '" data-step="' + one.first + '" data-last="' + one.last + '" aria-label="' + spoken + '" opacity="' + opacity + '" style="--step:' + one.first + '"><title>' + spoken + "</title>" + parts + "</g>";
  }
  function ghostMark(cells, grid, size) {
    const wide = WIDTH / grid[1], high = heightOf(size) / grid[0];
    const points = cells.map(function (cell) {
      return fixed((cell % grid[1] + 0.5) * wide) + "," + fixed((Math.floor(cell / grid[1]) + 0.5) * high);
    });
    return '<polyline class="ghost" points="' + points.join(" ") + '"></polyline>';
  }
  function boxMarks(boxes, size) {
    const high = heightOf(size);
    return ["evidence under", "evidence"].map(function (kind) {
      return boxes.map(function (box) {
        const x = box[0] * WIDTH + 3, y = box[1] * high + 3;
        const wide = Math.max(4, (box[2] - box[0]) * WIDTH - 6), tall = Math.max(4, (box[3] - box[1]) * high - 6);
        return '<rect class="' + kind + '" x="' + fixed(x) + '" y="' + fixed(y) + '" width="' + fixed(wide) + '" height="' + fixed(tall) + '" rx="8"></rect>';
      }).join("");
    }).join("");
  }
  function editMarks(cells, grid, size) {
    const wide = WIDTH / grid[1], high = heightOf(size) / grid[0];
    return cells.map(function (cell) {
      const x = cell % grid[1] * wide, y = Math.floor(cell / grid[1]) * high;
      return '<rect class="edit" x="' + fixed(x + 2) + '" y="' + fixed(y + 2) + '" width="' + fixed(wide - 4) + '" height="' + fixed(high - 4) + '"></rect>';
    }).join("");
  }

  // -------------------------------------------------------------------- one explorer

  function explore(root) {
    const data = JSON.parse(root.querySelector('script[type="application/json"]').textContent);
    const pictures = Array.from(root.querySelectorAll(".plain")).map(function (one) {
      return Array.from(one.querySelectorAll("figure")).map(function (figure) { return Array.from(figure.querySelectorAll("img")); });
    });
    if (!data.cases.length) return;
    const id = root.id, names = data.names, NAMES = ["original", "edited"];
    const state = { number: 0, view: 0, from: 0, step: 0, cell: null, evidence: false };
    let drawn = "", kept = data.cases.map(function (_, number) { return number; }), linked = false;
    const browser = caseBrowser.browse(root, chosen), filters = caseBrowser.filters(root, data.cases, filtered);

    // What is built once.
    const thumbs = data.cases.map(function (one, number) {
      const image = make("img", { alt: "", src: pictures[number][0][0].src, class: pictures[number][0][0].className || null });
      const label = "Case " + (number + 1) + ": " + one.about + (one.failed ? ", a failure" : "") + (one.views[0].steered.length ? ", can be steered" : "");
      const marks = [image, make("span", { text: String(number + 1) })];
      if (one.failed) marks.push(make("span", { class: "fail", text: "✗" }));
      if (one.views[0].steered.length) marks.push(make("span", { class: "move", text: "✥" }));
      const button = make("button", { type: "button", class: "thumb", "aria-pressed": "false", "aria-label": label, title: label }, marks);
      button.addEventListener("click", function () { open(number); });
      return button;
    });
    const previous = make("button", { type: "button", class: "step", "aria-label": "Previous case", text: "‹" });
    const next = make("button", { type: "button", class: "step", "aria-label": "Next case", text: "›" });
    previous.addEventListener("click", function () { move(-1); });
    next.addEventListener("click", function () { move(1); });
    const strip = make("div", { class: "thumbs", role: "group", "aria-label": "Cases" }, thumbs);
    const heading = make("h3", {}), question = make("p", { class: "question" });
    const sides = NAMES.map(function (name, number) {
      const button = make("button", { type: "button", "aria-pressed": "false", text: (number ? "Edited" : "Original") + " picture" });
      button.addEventListener("click", function () { look(number); link(); });
      return button;
    });
    const picture = make("img", {}), svg = document.createElementNS("http://www.w3.org/2000/svg", "svg");
    svg.setAttribute("class", "walk");
    svg.setAttribute("role", "group");
    const cells = make("div", { class: "cells", role: "group" }), heat = layer("heat");
    const board = make("div", { class: "board" }, [picture, heat, svg, cells]), more = make("div", { class: "boards" });
    const readout = make("p", { class: "readout" });
    const options = make("ol", { class: "options" });
    const said = make("ul", { class: "said", "aria-live": "polite" });
    const slider = make("input", { type: "range", min: "1", step: "1", id: id + "-from" });
    const slots = make("ol", { class: "slots", "aria-hidden": "true" });
    const told = make("output", { for: id + "-from" });
    const sliderLabel = make("label", { for: id + "-from" });
    slider.addEventListener("input", function () {
      state.from = Number(slider.value);
      state.cell = null;
      show();
    });
    const stepButtons = make("div", { class: "buttons" });
    const steerHint = make("p", { class: "hint", id: id + "-hint" });
    const steering = make("fieldset", { class: "steering" }, [make("legend", { text: "Move a thought" }), steerHint, stepButtons]);
    const evidence = make("button", { type: "button", "aria-pressed": "false", text: "Show the evidence" });
    evidence.addEventListener("click", function () { state.evidence = !state.evidence; show(); });
    const reset = make("button", { type: "button", class: "reset", text: "Reset" });
    reset.addEventListener("click", restart);
    const keys = make("details", { class: "keys" }, [make("summary", { text: "Keyboard" })]);
    keys.append(make("dl", {}, KEYS.map(function (pair) {
      const names = pair[0].split(" ").map(function (name) { return make("kbd", { text: name }); });
      return make("div", {}, [make("dt", {}, names.flatMap(function (name, place) { return place ? [" ", name] : [name]; })), make("dd", { text: pair[1] })]);
    })));
    const none = make("p", { class: "none", text: "No case fits these filters." });
    const toggle = make("div", { class: "toggle", role: "group", "aria-label": "Picture" }, sides);
    const stage = make("div", { class: "stage" }, [
      toggle, board, more, readout, browser.controls,
      make("fieldset", { class: "span" }, [make("legend", {}, [sliderLabel]), slider, slots, told]),
    ]);
    const body = make("div", { class: "case" }, [
      make("div", { class: "ask" }, [heading, question]), stage,
      make("div", { class: "answers" }, [options, said]),
      make("div", { class: "controls" }, [steering, make("fieldset", {}, [make("div", { class: "buttons" }, [evidence, reset])])]),
      browser.cards,
    ]);
    const card = make("div", { class: "card" }, [filters.element, make("div", { class: "strip" }, [previous, strip, next]), none, body, keys]);
    root.append(card);
    root.classList.add("ready");

    // A drawing over a picture.
    function layer(name) {
      const made = document.createElementNS("http://www.w3.org/2000/svg", "svg");
      made.setAttribute("class", name);
      made.setAttribute("preserveAspectRatio", "none");
      made.setAttribute("aria-hidden", "true");
      return made;
    }

    // What can be chosen.
    function start() {
      state.view = 0;
      state.step = 0;
      state.cell = null;
      state.from = view().walk.cells.length + 1;
      show();
    }
    function go(number) {
      state.number = (number + data.cases.length) % data.cases.length;
      state.evidence = false;
      start();
      const thumb = thumbs[state.number];
      strip.scrollLeft = thumb.offsetLeft - strip.offsetLeft - strip.clientWidth / 2 + thumb.offsetWidth / 2;
    }
    function restart() {
      browser.clear();
      start();
      link();
    }
    function open(number) {
      go(number);
      link();
    }
    // To the next case that fits the filters.
    function move(way) {
      if (!kept.length) return;
      const at = kept.indexOf(state.number);
      open(kept[((at < 0 ? (way > 0 ? -1 : 0) : at) + way + kept.length) % kept.length]);
    }
    function filtered(numbers) {
      kept = numbers;
      thumbs.forEach(function (thumb, number) { thumb.hidden = !kept.includes(number); });
      none.hidden = kept.length > 0;
      body.hidden = !kept.length;
      previous.disabled = next.disabled = kept.length < 2;
      if (kept.length && !kept.includes(state.number)) go(kept[0]);
      link();
    }
    function chosen() {
      show();
      link();
    }
    function look(number) {
      if (number >= current().views.length) return;
      state.view = number;
      state.cell = null;
      show();
    }
    function put(cell) {
      state.cell = cell;
      state.from = view().walk.cells.length + 1;
      show();
      cells.children[cell].focus({ preventScroll: true });
    }
    function chooseStep(step) {
      state.step = state.step === step ? 0 : step;
      state.cell = null;
      state.from = view().walk.cells.length + 1;
      show();
    }
    function current() { return data.cases[state.number]; }
    function view() { return current().views[state.view]; }
    function shownPictures() { return [view()].concat(view().more || []); }
    function steered() {
      return view().steered.find(function (one) { return one.step === state.step; }) || null;
    }

    // The span that these choices make: where its latents are, where each comes from, and what is replied.
    function span() {
      const own = view().walk, count = own.cells.length, moved = steered();
      let from = count + 1, later = null, reply = view().replies[0], kinds = [];
      if (moved !== null && state.cell !== null) {
        from = moved.step;
        later = moved.walks[state.cell];
        reply = { answer: moved.answers[state.cell], text: "", expected: moved.expected[state.cell] };
        kinds = later.cells.map(function (_, index) { return index ? "after" : "put"; });
      } else if (state.from <= count) {
        from = state.from;
        later = view().swaps[from - 1].walk;
        reply = view().swaps[from - 1].reply;
        kinds = later.cells.map(function () { return "donor"; });
      }
      const before = own.cells.slice(0, from - 1);
      return {
        from: from, count: count, reply: reply,
        steered: moved !== null && state.cell !== null, swapped: later !== null && (moved === null || state.cell === null),
        cells: before.concat(later === null ? [] : later.cells),
        cosine: own.cosine.slice(0, from - 1).concat(later === null ? [] : later.cosine),
        kinds: before.map(function () { return "own"; }).concat(kinds),
      };
    }
    function option(answer) {
      const place = answer === null || answer.length !== 1 ? -1 : answer.charCodeAt(0) - 65;
      const choices = current().choices;
      return place >= 0 && place < choices.length ? answer + " (" + choices[place] + ")" : answer;
    }
    function range(first, last) {
      return first === last ? "z" + first : "z" + first + " to z" + last;
    }

    // -------------------------------------------------------------- what is shown

    function show() {
      const made = span();
      showCase();
      showBoard(made);
      showAnswers(made);
      showSlider(made);
      showSteering();
      browser.show();
      stay();
    }
    // The picture stays beside the numbers while they are scrolled, if it fits below the page's list of sections.
    function stay() {
      const nav = document.querySelector("nav"), above = (nav ? nav.offsetHeight : 0) + 12;
      stage.style.setProperty("--above", above + "px");
      stage.classList.toggle("stays", stage.offsetHeight + above <= window.innerHeight);
    }
    window.addEventListener("resize", stay);
    function showCase() {
      const one = current();
      thumbs.forEach(function (button, number) { button.setAttribute("aria-pressed", String(number === state.number)); });
      heading.textContent = "Case " + (state.number + 1) + " of " + data.cases.length + ": " + one.about;
      if (one.failed) heading.append(make("span", { class: "tag", text: "✗ failure", title: one.views.length > 1 ? "The model answers one of its two pictures wrongly." : "The model answers it wrongly." }));
      question.textContent = one.question;
      sides.forEach(function (button, number) { button.setAttribute("aria-pressed", String(number === state.view)); });
      toggle.hidden = one.views.length < 2;
      evidence.setAttribute("aria-pressed", String(state.evidence));
      evidence.hidden = !shownPictures().some(function (one) { return one.evidence.length; });
    }
    function showBoard(made) {
      const here = view(), source = pictures[state.number][state.view][0];
      picture.className = source.className;
      if (picture.getAttribute("src") !== source.getAttribute("src")) picture.src = source.src;
      picture.alt = (current().views.length < 2 ? "The" : state.view ? "Edited" : "Original") + " picture";
      svg.setAttribute("viewBox", "0 0 " + WIDTH + " " + heightOf(here.size));
      svg.setAttribute("aria-label", "Walk of the latents over the " + (current().views.length < 2 ? "" : NAMES[state.view] + " ") + "picture");
      const marks = (state.view ? editMarks(here.changed, here.grid, here.size) : "")
        + (state.evidence ? boxMarks(here.evidence, here.size) : "")
        + (made.from <= made.count ? ghostMark(here.walk.cells.slice(Math.max(0, made.from - 2)), here.grid, here.size) : "")
        + walkMarks(made.cells, made.cosine, made.kinds, here.grid, here.size);
      if (marks !== drawn) {
        svg.innerHTML = drawn = marks;
        const since = made.from <= made.count ? made.from : 1;
        svg.style.setProperty("--since", since);
        svg.classList.add("moving");
        svg.querySelectorAll(".stop").forEach(telling);
        // Steps before the one that changed stay where they were.
        svg.querySelectorAll(".stop, .leg, .halo").forEach(function (mark) {
          if (Number(mark.style.getPropertyValue("--step")) < since) mark.style.animation = "none";
        });
      }
      const boards = [{ heat: heat, size: here.size }].concat(showMore(made));
      board.parentNode.classList.toggle("several", boards.length > 1);
      browser.open(state.number, state.view, boards);
      markChosen();
      quiet();
    }
    function telling(stop) {
      stop.setAttribute("tabindex", "0");
      stop.setAttribute("role", "img");
      ["mouseenter", "focus"].forEach(function (event) {
        stop.addEventListener(event, function () { readout.textContent = stop.getAttribute("aria-label"); });
      });
      ["mouseleave", "blur"].forEach(function (event) { stop.addEventListener(event, quiet); });
    }
    // The other pictures of a question that shows several.
    function showMore(made) {
      let start = view().grid[0] * view().grid[1];
      const found = (view().more || []).map(function (one, place) {
        const own = layer("heat"), walk = layer("walk"), source = pictures[state.number][state.view][place + 1];
        walk.setAttribute("viewBox", "0 0 " + WIDTH + " " + heightOf(one.size));
        walk.innerHTML = (state.evidence ? boxMarks(one.evidence, one.size) : "") + walkMarks(made.cells, made.cosine, made.kinds, one.grid, one.size, start);
        walk.removeAttribute("aria-hidden");
        walk.querySelectorAll(".stop").forEach(telling);
        start += one.grid[0] * one.grid[1];
        const image = make("img", { src: source.src, class: source.className || null, alt: "Picture " + (place + 2) });
        return { heat: own, size: one.size, board: make("div", { class: "board" }, [image, own, walk]) };
      });
      more.replaceChildren.apply(more, found.map(function (one) { return one.board; }));
      return found;
    }
    // The latent whose map is shown.
    function markChosen() {
      const query = browser.state.query;
      stage.querySelectorAll(".stop").forEach(function (stop) {
        const first = Number(stop.dataset.step), last = Number(stop.dataset.last || first);
        stop.classList.toggle("chosen", browser.state.overlay !== "" && first <= query && query <= last);
      });
    }
    function quiet() {
      readout.textContent = state.view && view().changed.length
        ? "Outlined in yellow: where the picture was edited."
        : (window.matchMedia("(hover: none)").matches ? "Tap a number" : "Point at a number, or reach it with Tab,") + " for its cosine.";
    }
    function verdict(made, number, reply) {
      const other = NAMES[1 - state.view];
      if (reply.answer === null) return ["unread", "", "gives no answer that can be read" + (reply.text ? ": “" + reply.text.slice(0, 80) + "”" : "")];
      const words = "says " + option(reply.answer);
      if (number === 0 && made.steered) {
        const own = view().replies[0].answer;
        if (reply.expected === null) return ["", "", words + (reply.answer === own ? ", as before" : " instead of " + (own === null ? "nothing readable" : option(own)))];
        if (reply.expected === reply.answer) return ["follows", "⇢ ", words + ": ✓ the way leads there from the chosen cell"];
        return ["wrong", "✗ ", words + ": ✗ from the chosen cell the way leads to " + option(reply.expected)];
      }
      if (reply.verdict === "right") return ["right", "✓ ", words + ": ✓ right"];
      if (reply.verdict === "other" && number === 0 && made.swapped) return ["follows", "⇢ ", words + ": ⇢ right for the " + other + " picture, it follows the swapped latents"];
      if (reply.verdict === "other") return ["wrong", "✗ ", words + ": ✗ wrong, it is right for the " + other + " picture"];
      return ["wrong", "✗ ", words + ": ✗ wrong"];
    }
    function showAnswers(made) {
      const one = current(), here = view(), elsewhere = one.views.length > 1 ? one.views[1 - state.view].truth : null;
      const replies = [made.reply].concat(here.replies.slice(1));
      const verdicts = replies.map(function (reply, number) { return verdict(made, number, reply); });
      options.replaceChildren.apply(options, one.choices.map(function (text, place) {
        const letter = String.fromCharCode(65 + place), row = [make("span", { class: "letter", text: letter }), make("span", { text: text })];
        const right = here.truth === letter;
        if (right) row.push(make("span", { class: "truth", text: "✓ right answer" }));
        else if (elsewhere === letter) row.push(make("span", { class: "elsewhere", text: "right for the " + NAMES[1 - state.view] + " picture" }));
        const votes = replies.map(function (reply, number) {
          return reply.answer === letter ? make("span", { class: "vote " + verdicts[number][0], text: verdicts[number][1] + names[number] }) : null;
        }).filter(Boolean);
        row.push(make("span", { class: "who" }, votes));
        return make("li", { class: right ? "true" : null }, row);
      }));
      const lines = replies.map(function (_, number) {
        const found = verdicts[number];
        return make("li", {}, [make("b", { text: names[number] }), " ", make("span", { class: found[0] || null, text: found[2] })]);
      });
      if (!one.choices.length) lines.unshift(make("li", {}, [make("b", { text: "Right answer: " }), here.truth]));
      said.replaceChildren.apply(said, lines);
    }
    function showSlider(made) {
      const other = NAMES[1 - state.view], count = made.count;
      slider.hidden = told.hidden = !view().swaps.length;
      sliderLabel.textContent = view().swaps.length ? "Latents of the " + other + " picture from step t on" : "Latents, with their cosine";
      slider.max = String(count + 1);
      slider.value = String(state.from);
      slider.style.setProperty("--cut", (100 * (state.from - 1) / count) + "%");
      const text = made.swapped
        ? range(state.from, count) + (state.from === count ? " is that" : " are those") + " of the " + other + " picture. The picture itself stays."
        : made.steered ? "z" + made.from + " was put elsewhere; the model went on from there by itself." : "None yet: drag the knob to the left to swap them in.";
      told.textContent = text;
      slider.setAttribute("aria-valuetext", made.swapped ? "from step " + state.from + ": " + range(state.from, count) + " of the " + other + " picture" : "none swapped");
      slots.classList.toggle("many", count > 12);
      slots.replaceChildren.apply(slots, made.cells.map(function (_, index) {
        const cosine = make("small", { text: signed(made.cosine[index]) });
        return make("li", { class: made.kinds[index] + (browser.state.query === index + 1 && browser.cards.childElementCount ? " chosen" : "") }, [count > 24 ? "" : (count > 12 ? "" : "z") + (index + 1), cosine]);
      }));
    }
    function showSteering() {
      const here = view(), moved = steered();
      steering.hidden = !here.steered.length;
      stepButtons.replaceChildren.apply(stepButtons, here.steered.map(function (one) {
        const button = make("button", { type: "button", "aria-pressed": String(one.step === state.step), text: "z" + one.step, "aria-label": "Move z" + one.step });
        button.addEventListener("click", function () {
          chooseStep(one.step);
          stepButtons.children[here.steered.indexOf(one)].focus();
        });
        return button;
      }));
      steerHint.textContent = moved === null
        ? "Choose a latent, then a cell of the picture: the latent becomes that cell’s visual token, and the model goes on from there."
        : state.cell === null ? "Now choose a cell of the picture for z" + state.step + "." : "z" + state.step + " is " + placeOf(state.cell, moved.grid) + ". Choose another cell, or reset.";
      cells.hidden = moved === null;
      svg.style.pointerEvents = moved === null ? "" : "none";
      if (moved === null) {
        cells.replaceChildren();
        return;
      }
      cells.setAttribute("aria-label", "Cell for z" + moved.step);
      cells.style.gridTemplateColumns = "repeat(" + moved.grid[1] + ", 1fr)";
      cells.style.gridTemplateRows = "repeat(" + moved.grid[0] + ", 1fr)";
      const focus = state.cell === null ? 0 : state.cell;
      cells.replaceChildren.apply(cells, moved.walks.map(function (_, cell) {
        const label = "Put z" + moved.step + " " + placeOf(cell, moved.grid);
        const button = make("button", { type: "button", class: "cell", "aria-label": label, "aria-pressed": String(cell === state.cell), tabindex: cell === focus ? "0" : "-1" });
        button.addEventListener("click", function () { put(cell); });
        return button;
      }));
    }

    // -------------------------------------------------------------- keyboard

    cells.addEventListener("keydown", function (event) {
      const moved = steered(), at = Array.from(cells.children).indexOf(document.activeElement);
      const ways = { ArrowLeft: [0, -1], ArrowRight: [0, 1], ArrowUp: [-1, 0], ArrowDown: [1, 0] };
      if (!moved || at < 0 || !ways[event.key]) return;
      event.preventDefault();
      const row = clamp(Math.floor(at / moved.grid[1]) + ways[event.key][0], 0, moved.grid[0] - 1);
      const column = clamp(at % moved.grid[1] + ways[event.key][1], 0, moved.grid[1] - 1);
      cells.children[at].tabIndex = -1;
      const goal = cells.children[row * moved.grid[1] + column];
      goal.tabIndex = 0;
      goal.focus({ preventScroll: true });
    });
    strip.addEventListener("keydown", function (event) {
      const way = { ArrowLeft: -1, ArrowRight: 1 }[event.key];
      if (!way) return;
      event.preventDefault();
      move(way);
      thumbs[state.number].focus({ preventScroll: true });
    });
    function act(name) {
      const latents = view().walk.cells.length;
      const actions = {
        e: function () { look(1 - state.view); link(); return true; }, r: function () { restart(); return true; },
        n: function () { move(1); return true; }, p: function () { move(-1); return true; },
        v: function () { state.evidence = !state.evidence; show(); return true; },
        k: function () { return browser.key("latent", latents, 1); }, j: function () { return browser.key("latent", latents, -1); },
        l: function () { return browser.key("layer", latents, 1); }, L: function () { return browser.key("layer", latents, -1); },
        o: function () { return browser.key("overlay", latents); }, w: function () { return browser.key("walk", latents); },
        f: function () { filters.focus(); return true; }, x: function () { filters.reset(); return true; },
        "?": function () { keys.open = !keys.open; return true; },
        0: function () { return browser.key("query", latents, "answer"); },
        ArrowRight: function () { move(1); return true; }, ArrowLeft: function () { move(-1); return true; },
        ArrowDown: function () { return browser.key("latent", latents, 1); }, ArrowUp: function () { return browser.key("latent", latents, -1); },
      };
      if (/^[1-9]$/.test(name)) return Number(name) <= latents && browser.key("query", latents, Number(name));
      const action = actions[name] || actions[name.toLowerCase()];
      return action ? action() : false;
    }
    document.addEventListener("keydown", function (event) {
      const target = event.target, inside = root.contains(target), box = root.getBoundingClientRect();
      if (!(target === document.body || inside) || event.defaultPrevented || event.ctrlKey || event.metaKey || event.altKey || !root.offsetHeight) return;
      if (target === document.body && (box.bottom < 0 || box.top > window.innerHeight)) return;
      // Fields and what scrolls keep their arrows, lists their letters too; up and down scroll the page outside of the card.
      const arrow = event.key.startsWith("Arrow"), scrolls = inside && target.closest("input, .cells, .wide");
      if ((inside && target.tagName === "SELECT") || (arrow && scrolls) || (!inside && /^Arrow(Up|Down)$/.test(event.key))) return;
      if (act(event.key)) event.preventDefault();
    });

    // -------------------------------------------------------------- links

    // The address names what is shown, from the first choice on; #case=… opens it again.
    function link() {
      if (!linked) return;
      const values = new URLSearchParams({ case: current().id });
      if (document.querySelectorAll(".explorer").length > 1) values.set("in", id);
      if (state.view) values.set("view", NAMES[state.view]);
      Object.entries(Object.assign({}, browser.asLink(), filters.asLink())).forEach(function (pair) { if (pair[1]) values.set(pair[0], pair[1]); });
      try {
        history.replaceState(null, "", "#" + values);
      } catch (error) {
        // Some browsers forbid it for a page from the disk: it works without.
      }
    }
    function follow() {
      const values = new URLSearchParams(location.hash.slice(1)), where = values.get("in");
      const number = data.cases.findIndex(function (one) { return one.id === values.get("case"); });
      if (number < 0 || (where ? where !== id : root !== document.querySelector(".explorer"))) return false;
      const panel = root.closest(".panel"), button = panel && document.querySelector('button[data-panel="' + panel.id + '"]');
      if (button) button.click();
      linked = false;
      browser.fromLink(values);
      filters.fromLink(values);
      go(number);
      look(values.get("view") === NAMES[1] ? 1 : 0);
      linked = true;
      root.scrollIntoView();
      return true;
    }
    window.addEventListener("hashchange", follow);
    go(0);
    filters.apply();
    follow();
    linked = true;
  }

  document.querySelectorAll(".explorer").forEach(explore);
})();
