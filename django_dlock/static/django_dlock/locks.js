// Keeps the page of locks new. Without this script the page works by reloading it.
"use strict";
(() => {
  const locks = document.getElementById("dlock-locks");
  const status = document.getElementById("dlock-live");
  const address = new URL(location.href);
  address.searchParams.set("part", "1");
  let timer = 0;
  let isAsking = false;

  function tell(word) {
    status.textContent = status.dataset[word];
    status.className = `dlock-${word}`;
  }

  function show(html) {
    const focused = document.activeElement && document.activeElement.id;
    locks.innerHTML = html; // escaped by the server
    if (focused && document.activeElement.id !== focused) {
      document.getElementById(focused)?.focus({ preventScroll: true });
    }
    tell("live");
  }

  async function refresh() {
    clearTimeout(timer);
    if (document.hidden || isAsking) return; // becoming visible asks again
    isAsking = true;
    try {
      const answer = await fetch(address, { signal: AbortSignal.timeout(30000) });
      if (answer.redirected || answer.status === 403) return tell("out");
      if (!answer.ok) throw new Error(answer.statusText);
      show(await answer.text());
    } catch {
      tell("lost");
    } finally {
      isAsking = false;
    }
    timer = setTimeout(refresh, Number(locks.dataset.every));
  }

  document.addEventListener("visibilitychange", refresh);
  timer = setTimeout(refresh, Number(locks.dataset.every));
  tell("live");
})();
