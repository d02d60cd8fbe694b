"use strict";
const LONGEST = 2000, NEXT = 200, rounds = {};
const wait = (milliseconds) => new Promise((done) => setTimeout(done, milliseconds));

function round(name) {
  return (rounds[name] ??= {
    card: document.getElementById(`race-${name}`), wrongs: 0, over: 0, times: [],
  });
}

function show(event) {
  const name = event.strategy, { card } = round(name);
  if (event.order === undefined) {
    card.classList.add("on");
    return;
  }
  const one = round(name), square = card.querySelectorAll(".orders i")[event.order];
  const isWrong = event.done.length > 1;
  square.className = isWrong ? "wrong" : event.done[0] ?? "none";
  one.over += 1;
  one.wrongs += isWrong;
  one.times.push(...event.ms);
  const count = card.querySelector(".wrongs");
  count.textContent = `${one.wrongs} of ${one.over}`;
  count.classList.toggle("bad", one.wrongs > 0);
  draw(card, one);
}

function quantile(times, share) {
  const sorted = [...times].sort((a, b) => a - b);
  return sorted[Math.min(sorted.length - 1, Math.floor(share * sorted.length))];
}

function draw(card, one) {
  const width = 200 / card.querySelectorAll(".orders i").length;
  for (const time of one.times.slice(-2)) {
    const dot = document.createElementNS("http://www.w3.org/2000/svg", "circle");
    const height = Math.log10(1 + Math.min(time, LONGEST)) / Math.log10(1 + LONGEST);
    for (const [name, value] of Object.entries({ cx: (one.over - 0.5) * width, cy: 58 - 56 * height, r: 1.3 })) {
      dot.setAttribute(name, value);
    }
    card.querySelector("svg").append(dot);
  }
  card.querySelector(".times").textContent =
    `half within ${Math.round(quantile(one.times, 0.5))} ms, 99 % within ${Math.round(quantile(one.times, 0.99))} ms`;
}

function compare() {
  const all = Object.entries(rounds).filter(([, one]) => one.over), rows = document.querySelector("#chart tbody");
  const slowest = Math.max(...all.map(([, one]) => quantile(one.times, 0.99)));
  rows.replaceChildren(...all.map(([name, one]) => {
    const row = document.createElement("tr"), p50 = quantile(one.times, 0.5), p99 = quantile(one.times, 0.99);
    row.insertCell().textContent = name;
    bar(row.insertCell(), one.wrongs, one.over, "bad", one.wrongs);
    bar(row.insertCell(), p50, slowest, "time", `${Math.round(p50)} ms`);
    bar(row.insertCell(), p99, slowest, "time", `${Math.round(p99)} ms`);
    return row;
  }));
  document.getElementById("chart").hidden = all.length === 0;
}

function bar(cell, value, whole, kind, text) {
  const line = document.createElement("span");
  line.className = `bar ${kind}`;
  line.style.setProperty("--share", value / (whole || 1));
  cell.append(line, ` ${text}`);
}

async function follow() {
  let position = 0, state = "running";
  while (state === "running") {
    const response = await fetch(`{% url "race_lines" %}?from=${position}`), text = await response.text();
    position += new TextEncoder().encode(text).length;
    for (const line of text.split("\n").filter(Boolean)) {
      const event = JSON.parse(line);
      if (event.strategy) show(event);
    }
    compare();
    state = response.headers.get("Race");
    if (state === "running") await wait(NEXT);
  }
  const button = document.querySelector("button.main"), trouble = document.getElementById("trouble");
  button.disabled = false;
  button.textContent = "Start";
  if (state === "failed") {
    trouble.textContent = "The race has failed: run manage.py race to see why.";
    trouble.hidden = false;
  }
}

follow();
