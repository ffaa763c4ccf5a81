// Supervised training of mini's GPT with libtorch: the same files, windows and losses as
//
//     python -m mini text --algo supervised --log-dir FOLDER
//
// which writes config.json (options), start.pt (weights) and tokens.bin (16 bits per token) to its folder.
//
//     train FOLDER [STEPS]        prints each step's loss in nats per token, and writes FOLDER/cpp.pt: a dict of
//                                weights, for torch.load(..., weights_only=False)
//
// B windows    T tokens to predict    C width    H heads    V vocabulary

#include <torch/torch.h>

#include <ATen/CPUGeneratorImpl.h>

#include <chrono>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <exception>
#include <fstream>
#include <iterator>
#include <map>
#include <regex>
#include <stdexcept>
#include <string>
#include <utility>
#include <vector>

namespace F = torch::nn::functional;
using torch::Tensor;

std::vector<char> read_file(const std::string& path) {
    std::ifstream file(path, std::ios::binary);
    if (!file) throw std::runtime_error(path + " cannot be read");
    return {std::istreambuf_iterator<char>(file), std::istreambuf_iterator<char>()};
}

// The options as Python wrote them: a flat JSON object.
struct Config {
    std::string text;

    explicit Config(const std::string& path) {
        const auto bytes = read_file(path);
        text.assign(bytes.begin(), bytes.end());
    }

    std::string word(const std::string& name) const {
        std::smatch found;
        const std::regex line("\"" + name + "\": *\"?([^\",\\n}]+)");
        if (!std::regex_search(text, found, line)) throw std::runtime_error("config.json has no " + name);
        return found[1];
    }

    double number(const std::string& name) const { return std::stod(word(name)); }
    int64_t integer(const std::string& name) const { return std::stoll(word(name)); }
};

// The training ids: all but the last tenth of tokens.bin, lower byte first.
Tensor read_tokens(const std::string& path) {
    const auto bytes = read_file(path);
    const auto count = static_cast<int64_t>(bytes.size() / 2);
    auto ids = torch::empty({count - count / 10}, torch::kLong);
    auto* id = ids.data_ptr<int64_t>();
    for (int64_t i = 0; i < ids.numel(); ++i)
        id[i] = static_cast<uint8_t>(bytes[2 * i]) | static_cast<uint8_t>(bytes[2 * i + 1]) << 8;
    return ids;
}

struct Gpt {
    std::map<std::string, Tensor> weights;  // named as in model.py
    int64_t layers = 0, heads;

    Gpt(const std::string& path, int64_t heads) : heads(heads) {
        for (const auto& entry : torch::pickle_load(read_file(path)).toGenericDict())
            weights[entry.key().toStringRef()] = entry.value().toTensor().clone().requires_grad_();
        while (weights.count("h." + std::to_string(layers) + ".ln_1.weight")) ++layers;
    }

    std::vector<Tensor> parameters() const {
        std::vector<Tensor> all;
        for (const auto& [name, weight] : weights) all.push_back(weight);
        return all;
    }

    Tensor linear(const Tensor& x, const std::string& name) const {
        return torch::linear(x, weights.at(name + ".weight"), weights.at(name + ".bias"));
    }

    Tensor norm(const Tensor& x, const std::string& name) const {
        return torch::layer_norm(x, {x.size(-1)}, weights.at(name + ".weight"), weights.at(name + ".bias"));
    }

    Tensor attention(const Tensor& x, const std::string& name) const {
        std::vector<Tensor> parts = linear(x, name + ".c_attn").chunk(3, 2);
        for (auto& part : parts) part = part.unflatten(2, {heads, -1}).transpose(1, 2);  // (B, H, T, C / H)
        const auto y = torch::scaled_dot_product_attention(parts[0], parts[1], parts[2], {}, 0.0, /*is_causal=*/true);
        return linear(y.transpose(1, 2).flatten(2), name + ".c_proj");
    }

    // ids (B, T) -> logits (B, T, V)
    Tensor operator()(const Tensor& ids) const {
        const auto& wte = weights.at("wte.weight");  // shared by embedding and head
        Tensor x = torch::embedding(wte, ids) + weights.at("wpe.weight").slice(0, 0, ids.size(1));
        for (int64_t layer = 0; layer < layers; ++layer) {
            const auto name = "h." + std::to_string(layer);
            x = x + attention(norm(x, name + ".ln_1"), name + ".attn");
            const auto inner = torch::gelu(linear(norm(x, name + ".ln_2"), name + ".mlp.c_fc"), "tanh");
            x = x + linear(inner, name + ".mlp.c_proj");
        }
        return torch::linear(norm(x, "ln_f"), wte);
    }

    void save(const std::string& path) const {
        c10::Dict<std::string, Tensor> dict;
        for (const auto& [name, weight] : weights) dict.insert(name, weight.detach());
        const auto bytes = torch::pickle_save(dict);
        std::ofstream file(path, std::ios::binary);
        file.write(bytes.data(), static_cast<std::streamsize>(bytes.size()));
        if (!file.flush()) throw std::runtime_error(path + " cannot be written");
    }
};

void train(const std::string& folder, const Config& config, int64_t steps) {
    if (config.word("algo") != "supervised") throw std::runtime_error("only --algo supervised is known here");
    if (config.word("attention") != "mha") throw std::runtime_error("only --attention mha is known here");
    if (config.number("lr_decay") != 0) throw std::runtime_error("only --lr-decay 0 is known here");
    const auto ids = read_tokens(folder + "/tokens.bin");
    const Gpt model(folder + "/start.pt", config.integer("n_head"));
    const auto B = config.integer("batch_size"), T = config.integer("horizon");
    const auto parameters = model.parameters();
    torch::optim::AdamW optimizer(
        parameters, torch::optim::AdamWOptions(config.number("lr")).betas({0.9, 0.95}).weight_decay(0.0));
    const auto seed = static_cast<uint64_t>(config.integer("seed")) * 1000003;
    const auto began = std::chrono::steady_clock::now();
    for (int64_t step = 1; step <= steps; ++step) {
        const auto generator = at::detail::createCPUGenerator(static_cast<uint32_t>(seed + step - 1));
        const auto starts = torch::randint(ids.numel() - T, {B}, generator);  // as in draw_windows
        const auto text = ids.unfold(0, T + 1, 1).index({starts});            // (B, 1 + T)
        const auto logits = model(text.slice(1, 0, T));
        const auto loss = F::cross_entropy(logits.flatten(0, 1), text.slice(1, 1).flatten());
        optimizer.zero_grad();
        loss.backward();
        torch::nn::utils::clip_grad_norm_(parameters, config.number("max_grad_norm"));
        optimizer.step();
        const std::chrono::duration<double> passed = std::chrono::steady_clock::now() - began;
        std::printf("step %lld  loss %.6f  %.2f s\n", static_cast<long long>(step), loss.item<double>(), passed.count());
    }
    model.save(folder + "/cpp.pt");
}

int main(int count, char** words) {
    if (count < 2 || count > 3) {
        std::fprintf(stderr, "usage: train FOLDER [STEPS]\n");
        return 2;
    }
    try {
        const Config config(std::string(words[1]) + "/config.json");
        const int64_t steps = count == 3 ? std::atoll(words[2]) : config.integer("steps");
        if (steps < 1) throw std::runtime_error("STEPS must be a number above 0");
        train(words[1], config, steps);
    } catch (const std::exception& error) {
        const std::string reason = error.what();
        std::fprintf(stderr, "error: %s\n", reason.substr(0, reason.find('\n')).c_str());
        return 2;
    }
    return 0;
}
