// What the pages do beyond links and forms: refresh by themselves, the theme, and keys. Everything can be read without it.
(() => {
  const REFRESH_MS = 5000;
  const byId = (id) => document.getElementById(id);
  const main = () => byId("main");
  const tell = (text) => (byId("told").textContent = text);
  const store = {
    get: (key) => {
      try {
        return localStorage.getItem(key);
      } catch {
        return null;
      }
    },
    set: (key, value) => {
      try {
        if (value === null) localStorage.removeItem(key);
        else localStorage.setItem(key, value);
      } catch {
        // storage is forbidden: the choice holds for this page
      }
    },
  };
  for (const element of document.querySelectorAll(".js-only")) element.hidden = false;

  // -- theme: as the system has it, light, dark
  const THEMES = ["auto", "light", "dark"];
  let theme = THEMES.includes(store.get("flintmq-theme")) ? store.get("flintmq-theme") : "auto";
  const showTheme = () => {
    if (theme === "auto") delete document.documentElement.dataset.bsTheme;
    else document.documentElement.dataset.bsTheme = theme;
    byId("theme-text").textContent = { auto: "System", light: "Light", dark: "Dark" }[theme];
    document.dispatchEvent(new CustomEvent("themed"));
  };
  const nextTheme = () => {
    theme = THEMES[(THEMES.indexOf(theme) + 1) % THEMES.length];
    store.set("flintmq-theme", theme === "auto" ? null : theme);
    showTheme();
    tell(byId("theme").textContent);
  };
  byId("theme").addEventListener("click", nextTheme);
  matchMedia("(prefers-color-scheme: dark)").addEventListener("change", showTheme);
  showTheme();

  // -- refreshing: not while somebody types, selects text, or looks elsewhere
  const liveButton = byId("live");
  const canRefresh = () => main().hasAttribute("hx-get");
  let isLive = store.get("flintmq-live") !== "off";
  let failedSince = null;
  const showLive = () => {
    liveButton.hidden = !canRefresh();
    liveButton.setAttribute("aria-pressed", String(isLive));
    liveButton.classList.toggle("is-lost", failedSince !== null);
    byId("live-text").textContent = failedSince !== null ? "No answer" : isLive ? "Live" : "Paused";
  };
  const isBusy = () => {
    const active = document.activeElement;
    const isTyping = active && main().contains(active) && active.matches("input, select, textarea");
    const selection = getSelection();
    const isSelecting = selection && !selection.isCollapsed && main().contains(selection.anchorNode);
    return isTyping || isSelecting || document.querySelector("dialog[open]") !== null;
  };
  const refresh = () => canRefresh() && main().dispatchEvent(new CustomEvent("refresh"));
  const toggleLive = () => {
    isLive = !isLive;
    store.set("flintmq-live", isLive ? null : "off");
    showLive();
    tell(isLive ? "The page refreshes by itself" : "The page stays as it is");
  };
  liveButton.addEventListener("click", toggleLive);
  setInterval(() => isLive && !document.hidden && !isBusy() && refresh(), REFRESH_MS);
  document.addEventListener("visibilitychange", () => !document.hidden && isLive && !isBusy() && refresh());
  const lost = () => {
    failedSince ??= new Date();
    tell("nsqadmin does not answer; the page shows what it was");
    showLive();
  };
  document.addEventListener("htmx:error", lost);
  document.addEventListener("htmx:after:swap", () => {
    failedSince = null;
    mark(row);
    showLive();
    document.dispatchEvent(new CustomEvent("refreshed"));
  });
  document.addEventListener("htmx:before:swap", (event) => {
    const response = event.detail.ctx?.response?.raw;
    if (response && response.status === 404) {
      tell("This is not there any more"); // the page says so, in place of figures of the past
    } else if (response && !response.ok) {
      event.preventDefault(); // an error page in place of the figures would hide them
      lost();
    } else if (response && response.redirected) {
      event.preventDefault();
      location.reload(); // who was logged out logs in on a page of its own
    }
  });
  showLive();

  // -- keys
  let row = -1;
  const rows = () => [...document.querySelectorAll("table.rows tbody tr")];
  const mark = (number) => {
    const all = rows();
    for (const one of all) one.classList.remove("is-marked");
    row = Math.min(number, all.length - 1);
    if (row >= 0) all[row].classList.add("is-marked");
    return all[row];
  };
  const move = (by) => {
    const found = mark(Math.max(0, row + by));
    found?.querySelector("a")?.focus();
    found?.scrollIntoView({ block: "nearest" });
  };
  const pages = new Map(
    [...document.querySelectorAll(".tabs a")].map((link) => [link.getAttribute("aria-keyshortcuts").slice(2).toLowerCase(), link]),
  );
  let isAfterG = false;
  let forget = 0;
  const ACTS = {
    "/": () => byId("finder")?.focus(),
    f: () => (byId("filter") ?? byId("finder"))?.focus(),
    j: () => move(1),
    k: () => move(-1),
    r: refresh,
    l: toggleLive,
    d: nextTheme,
    "?": () => byId("keys").showModal(),
  };
  document.addEventListener("keydown", (event) => {
    const isInField = event.target.matches?.("input, select, textarea");
    if (event.key === "Escape" && isInField) event.target.blur();
    if (isInField || event.ctrlKey || event.metaKey || event.altKey || document.querySelector("dialog[open]")) return;
    if (isAfterG) {
      isAfterG = false;
      clearTimeout(forget);
      const link = pages.get(event.key);
      if (link) {
        event.preventDefault();
        link.click();
      }
      return;
    }
    if (event.key === "g") {
      isAfterG = true;
      forget = setTimeout(() => (isAfterG = false), 1500);
    } else if (Object.hasOwn(ACTS, event.key)) {
      event.preventDefault();
      ACTS[event.key]();
    }
  });

  // -- a dangerous act can be asked for when the name was typed
  const confirmation = byId("confirm");
  if (confirmation) {
    const button = confirmation.form.querySelector("button.btn-danger");
    const wanted = confirmation.labels[0].querySelector("b").textContent;
    const look = () => button.classList.toggle("is-waiting", confirmation.value !== wanted);
    confirmation.addEventListener("input", look);
    look();
  }
})();
